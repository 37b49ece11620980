
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, place = head.cellIndex, body = head.closest("table").tBodies[0];
  const up = head.ariaSort !== "ascending";
  for (const other of head.parentElement.cells) other.ariaSort = null;
  head.ariaSort = up ? "ascending" : "descending";
  const value = row => row.cells[place].textContent.trim(), order = new Intl.Collator("en", { numeric: true });
  const compare = (a, b) => (parseFloat(a) - parseFloat(b)) || order.compare(a, b);
  body.append(...[...body.rows].sort((a, b) => (up ? 1 : -1) * compare(value(a), value(b))));
});
for (const button of document.querySelectorAll(".zoom")) button.addEventListener("click", () => {
  const box = button.closest("figure").querySelector(".wide"), large = box.classList.toggle("large");
  button.ariaExpanded = large; button.textContent = large ? "Fit" : "Enlarge"; box.tabIndex = large ? 0 : -1;
});
const reveal = () => {
  const name = location.hash.slice(1), target = document.getElementById(name) || document.getElementById(decodeURIComponent(name));
  if (!target) return;
  for (let one = target; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
  const own = target.querySelector(":scope > details");
  if (own) own.open = true;
  target.scrollIntoView();
};
addEventListener("hashchange", reveal); addEventListener("load", reveal);
let closed = [];
addEventListener("beforeprint", () => { closed = [...document.querySelectorAll("details:not([open])")]; for (const one of closed) one.open = true; });
addEventListener("afterprint", () => { for (const one of closed) one.open = false; });
