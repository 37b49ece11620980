"""Builds validated cells from merged fields; each distinct section is validated once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from harness.cell import Cell, Optimizer, Target, Training, Workload
from harness.study.sweep.bounds import wrong
from harness.study.sweep.canonical import canonical
from harness.study.sweep.effects import is_off, unread
from harness.study.sweep.field_types import typed_option
from harness.study.sweep.fields import Fields, Leaf
from harness.workloads import WORKLOADS, WorkloadCard
from harness.yaml_files.document import Document, Place
from harness.yaml_files.validation_messages import explain, field_and_rest, not_allowed
from kfac_core.config import KFACConfig

_MODELS: Mapping[str, TypeAdapter[Any]] = {
    "workload": TypeAdapter(Workload),
    "target": TypeAdapter(Target),
    "training": TypeAdapter(Training),
    "optimizer": TypeAdapter(Optimizer),
    "kfac": TypeAdapter(KFACConfig),
}


@dataclass(frozen=True)
class Draft:
    """A cell's sections, each valid by itself; whether they fit together is checked in `Builder.cell`.

    Attributes:
        owner: the method or include entry of the cell.
        fields: source of the sections, for errors; without those that the cell does not read.
        merges: whether an axis was left out, so that another point may give the same cell.
    """

    owner: Place
    fields: Fields
    merges: bool
    method: str
    world_size: Any
    workload: Workload
    target: Target
    training: Training
    optimizer: Optimizer
    kfac: KFACConfig | None
    seed: int = 0
    trial: int | None = None

    def with_seed(self, seed: int) -> Draft:
        """The same draft for another seed."""
        return replace(self, seed=seed)

    def with_trial(self, trial: int) -> Draft:
        """The same draft as a trial."""
        return replace(self, trial=trial)


class Builder:
    """Builds the cells of one sweep file."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._sections: dict[tuple[str, str], Any] = {}
        self._fitting: set[tuple[str, Target]] = set()
        self._read: set[Place] = set()
        self._left_out: dict[Place, str] = {}
        self._checked: Fields | None = None

    def draft(self, owner: Place, fields: Fields, has_kfac: bool) -> Draft:
        """Validate the sections.

        Shared fields and axes that this method does not read are left out of it, and must be read by another.

        Raises:
            SweepError: a section is missing, or has a value that is invalid or that nothing reads.
        """
        draft = self._draft(owner, fields, has_kfac, merges=False)
        unused = unread(draft)
        idle = {path: leaf.place for path, leaf in fields.items() if path in unused}
        for path, place in idle.items():
            reason = f" has no effect {unused[path]}"
            if is_off(fields[path].value):
                self._read.add(self._axis_of(place))
            elif _is_own(place, fields["method"].place):
                raise self._document.error(place, f"{reason}; remove it (method {draft.method})")
            else:
                self._left_out.setdefault(self._axis_of(place), reason)
        self._read.update(self._axis_of(leaf.place) for path, leaf in fields.items() if path not in idle)
        if idle:
            merges = any(place[0] in ("grid", "zip") for place in idle.values())
            kept = {path: leaf for path, leaf in fields.items() if path not in idle}
            draft = self._draft(owner, kept, has_kfac, merges=merges)
        return draft

    def check_used(self) -> None:
        """Check that every shared field and every axis was read by some method.

        Raises:
            SweepError: one was not.
        """
        for place, reason in self._left_out.items():
            if place not in self._read:
                raise self._document.error(place, f"{reason}, and no other method reads it; remove it")

    def _draft(self, owner: Place, fields: Fields, has_kfac: bool, *, merges: bool) -> Draft:
        raw: dict[str, dict[str, Any]] = {section: {} for section in _MODELS}
        for path, leaf in fields.items():
            section, _, field = path.partition(".")
            if field.startswith("options."):
                raw[section].setdefault("options", {})[field.removeprefix("options.")] = leaf.value
            elif field:
                raw[section][field] = leaf.value
        if "world_size" not in fields:
            raise self._document.error(owner, " has no world_size; set one, or list several in `grid`")
        read = {
            section: self._section(section, values, fields, owner)
            for section, values in raw.items()
            if section != "kfac" or has_kfac
        }
        self._check_target(read["workload"], read["target"], fields, owner)
        return Draft(
            owner, fields, merges, fields["method"].value, fields["world_size"].value,
            read["workload"], read["target"], read["training"], read["optimizer"], read.get("kfac"),
        )  # fmt: skip

    def _axis_of(self, place: Place) -> Place:
        """The list of values that a point of an axis is from; any other place as it is."""
        return place[:-1] if place[0] in ("grid", "zip") and isinstance(place[-1], int) else place

    def cell(self, draft: Draft) -> Cell:
        """Build the cell, and check that its sections fit together.

        Raises:
            SweepError: they do not, or the batch is larger than the training data.
        """
        content = {name: getattr(draft, name) for name in Cell.model_fields if name != "sweep"}
        try:
            cell = Cell.model_validate({"sweep": self._document.content["sweep"], **content}, strict=True)
        except ValidationError as error:
            self._raise_error(draft, error)
        if draft.fields is not self._checked:  # else the same cell for another seed
            self._check_run(draft)
            self._check_batch(cell, draft)
            self._checked = draft.fields
        return canonical(cell)

    def _check_run(self, draft: Draft) -> None:
        for path, sentence in wrong(draft):
            section, _, field = path.partition(".")
            place = self._place(draft.fields, draft.owner, section, field)
            raise self._document.error(place, sentence + ("" if path == "method" else _which(draft)))

    def _check_batch(self, cell: Cell, draft: Draft) -> None:
        card, options = WORKLOADS[cell.workload.name], cell.workload.options
        batch, local_batch = cell.training.batch_sizes(cell.world_size)
        examples, least = card.examples(options), card.least_local_batch(options)
        field = "global_batch_size" if cell.training.scaling == "strong" else "local_batch_size"
        value = getattr(cell.training, field)
        place = self._place(draft.fields, draft.owner, "training", field)
        if examples and batch > examples:
            raise self._document.error(
                place,
                f"={value} makes a global batch of {batch}, but {cell.workload.name} has "
                f"{examples} training examples{_which(draft)}",
            )
        local_batch //= cell.training.accumulate
        normalised = local_batch * (cell.world_size if cell.training.sync_batch_norm else 1)
        if normalised < least:
            raise self._document.error(
                place,
                f"={value} makes a local batch of {local_batch}, but {options['model']} normalises over "
                f"{least} examples or more{_which(draft)}",
            )

    def _section(self, section: str, values: dict[str, Any], fields: Fields, owner: Place) -> Any:
        text = json.dumps(values)
        found = self._sections.get((section, text))
        if found is not None:
            return found
        if not values and section != "kfac":
            raise self._document.error((section,), f" is missing for {fields['method'].value}")
        if section == "workload":
            text_checked = json.dumps(self._with_options(values, fields, owner))
        else:
            text_checked = text
        try:
            # JSON instead of Python mode: strict about numbers and text, but a list may become a tuple
            built = _MODELS[section].validate_json(text_checked, strict=True)
        except ValidationError as error:
            inside, sentence = explain(error)
            place = self._place(fields, owner, section, str(inside[0]) if inside else "")
            raise self._document.error(place, sentence) from None
        self._sections[section, text] = built
        return built

    def _with_options(self, values: dict[str, Any], fields: Fields, owner: Place) -> dict[str, Any]:
        """The workload with the defaults of its card's options, which are part of a cell's id."""
        name = values.get("name")
        if not isinstance(name, str) or name not in WORKLOADS:
            place = self._place(fields, owner, "workload", "name" if name is not None else "")
            got = f"={name!r} is not a workload" if name is not None else " has no name"
            raise self._document.error(place, f"{got}{not_allowed(str(name), WORKLOADS)}")
        card = WORKLOADS[name]
        given = dict(values.get("options", {}))
        for option, value in given.items():
            place = fields[f"workload.options.{option}"].place
            given[option] = self._option(card, name, option, value, place)
        try:
            card.examples(given)
        except ValueError as error:
            option, sentence = field_and_rest(str(error))
            place = self._place(fields, owner, "workload", f"options.{option}")
            raise self._document.error(place, sentence) from None
        return {"name": name, "options": {**card.options, **given}}

    def _option(self, card: WorkloadCard, workload: str, option: str, value: Any, place: Place) -> Any:
        if option not in card.options:
            raise self._document.error(
                place, f" is not an option of {workload}{not_allowed(option, card.options)}"
            )
        value = typed_option(self._document, card.options[option], Leaf(value, place))
        if value not in card.choices.get(option, (value,)):
            raise self._document.error(
                place, f"={value!r} is not a known value{not_allowed(str(value), card.choices[option])}"
            )
        return value

    def _check_target(self, chosen: Workload, target: Target, fields: Fields, owner: Place) -> None:
        workload, card = chosen.name, WORKLOADS[chosen.name]
        option = card.needs.get(target.metric)
        if option and not chosen.options[option]:
            place = self._place(fields, owner, "target", "metric")
            raise self._document.error(
                place,
                f"={target.metric!r} needs workload.options.{option}: true",
            )
        if (workload, target) in self._fitting:
            return
        metrics = card.metrics
        if target.metric not in metrics:
            place = self._place(fields, owner, "target", "metric")
            known = not_allowed(target.metric, metrics)
            raise self._document.error(place, f"={target.metric!r} is not a metric of {workload}{known}")
        better = metrics[target.metric]
        if better != target.direction:
            got, wanted = ("at_least", "at_most") if better == "lower" else ("at_most", "at_least")
            place = self._place(fields, owner, "target", got)
            raise self._document.error(
                place, f"={target.value} contradicts {target.metric}, where {better} is better; use {wanted}"
            )
        self._fitting.add((workload, target))

    def _raise_error(self, draft: Draft, error: ValidationError) -> NoReturn:
        (field, *_), sentence = explain(error)
        paths = [path for path in draft.fields if path.rpartition(".")[2] == field]
        written = draft.fields[paths[0]].place if paths else (*draft.owner, str(field))
        place = (field,) if field == "sweep" else written
        suffix = "" if field in ("world_size", "sweep", "method", "seed") else _which(draft)
        raise self._document.error(place, sentence + suffix) from None

    def _place(self, fields: Fields, owner: Place, section: str, field: str) -> Place:
        """Where a field is written in the file; if it is not, its section."""
        if section in fields:
            return fields[section].place
        if f"{section}.{field}" in fields:
            return fields[f"{section}.{field}"].place
        own = (*owner, section)
        written = own if own in self._document.lines else (section,)
        return (*written, field) if field else written


def _is_own(place: Place, method: Place) -> bool:
    """Whether a value was written for this method alone: in it, on an axis that names it, or tuned."""
    return place[0] in ("methods", "include", "tuning") or (place[0] == "zip" and place[:2] == method[:2])


def _which(draft: Draft) -> str:
    """The cell that an error is about; its workload where the sweep has several."""
    varies = any(
        path.partition(".")[0] == "workload" and leaf.place[0] in ("grid", "zip", "include")
        for path, leaf in draft.fields.items()
    )
    workload = f", workload {draft.workload.name}" if varies else ""
    return f" (method {draft.method}, world_size={draft.world_size}{workload})"
