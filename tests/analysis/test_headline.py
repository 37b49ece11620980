"""`reproduce headline` answers in its first sentence, from archives, and says when there are none."""

import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from harness.cli import main
from harness.runs.archive import write_archive
from harness.runs.store import SweepFolder, sweep_folder
from tests.analysis.conftest import Plan, make_cell
from tests.analysis.hand_made import Run, write

pytestmark = pytest.mark.slow  # reads archives and writes a page in every test

SECONDS = {"sgd": 1.0, "nlcg": 2.0, "comm_opt": 1.1, "dp_kfac": 1.2}
KINDS = ("png", "pdf", "csv")
EPOCHS = {"sgd": 6, "nlcg": 6, "comm_opt": 3, "dp_kfac": 4}


def archive(folder: Path, sweep: str, cells: dict[str, list[Run]], trial: int | None = None) -> None:
    """The runs as `results/headline/<sweep>-<name>.tar.xz`, an archive for each name."""
    stored: SweepFolder = sweep_folder(sweep, folder / "runs")
    for name, runs in cells.items():
        folders = []
        for run in runs:
            cell = make_cell(run.method, run.world_size, run.seed, Plan(), run.patch)
            cell = cell.model_validate({**cell.model_dump(), "sweep": sweep, "trial": trial})
            folders.append(stored.stage(cell))
            write(folders[-1].new_attempt(), cell, run)
        write_archive(stored, folders, folder / "results/headline" / f"{sweep}-{name}.tar.xz")


def block(seed: int, epochs: dict[str, int] = EPOCHS) -> list[Run]:
    return [
        Run(method, 2, seed, count, SECONDS[method] * (1 + 0.01 * seed)) for method, count in epochs.items()
    ]


def first_sentence(folder: Path) -> str:
    return (folder / "results/headline/README.md").read_text().split("\n\n")[1]


@pytest.fixture(autouse=True)
def _at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_without_archives_it_says_that_the_study_has_not_been_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "headline"]) == 0
    assert first_sentence(tmp_path).startswith("**The study has not been run yet**")
    assert "has not been run" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "results/headline").iterdir()] == ["README.md"]


def test_trials_alone_are_no_study(tmp_path: Path, no_images: None) -> None:
    archive(tmp_path, "headline-tuning", {"trial-01": block(100)}, trial=1)
    archive(tmp_path, "headline-pilot", {"seed-200": block(200)[:1]})
    assert main(["reproduce", "headline"]) == 0
    assert first_sentence(tmp_path).startswith("**The study has not been run yet**")
    assert "How each method was tuned" in (tmp_path / "results/headline/README.md").read_text()
    assert len(pd.read_csv(tmp_path / "results/headline/trials.csv")) == 4


def test_a_faster_kfac_is_a_yes_with_its_saving(tmp_path: Path, no_images: None) -> None:
    archive(tmp_path, "headline-tuning", {"trial-01": block(100)}, trial=1)
    archive(tmp_path, "headline", {f"seed-{seed}": block(seed) for seed in range(6)})
    assert main(["reproduce", "headline"]) == 0
    sentence = first_sentence(tmp_path)
    # 6 epochs of 1 s against 3 of 1.1 s: a speed-up of 1.818, 45 % less time
    assert sentence.startswith(
        "**Yes**: On digits (its network, batch 64, float32, 2 ranks), K-FAC (`comm_opt`) reaches"
    )
    assert "the target (digits: accuracy ≥ 0.95)" in sentence
    assert "in 45% less time" in sentence
    assert (
        "0.50 times the epochs, each takes 1.10 times as long; it would break even at 2.00 times" in sentence
    )
    table = pd.read_csv(tmp_path / "results/headline/speedup.csv").set_index("arm")
    assert list(table.index) == ["sgd", "nlcg", "comm_opt", "dp_kfac"]
    assert table.loc["comm_opt", "speedup"] == pytest.approx(6 / 3.3)
    assert table.loc["comm_opt", "low"] > 1
    assert table.loc["nlcg", "speedup"] == pytest.approx(0.5)
    assert set(table["baseline"]) == {"sgd"}
    assert (
        "Goals: at least 25% less time in one setting, with the interval above zero: shown"
        in (tmp_path / "results/headline/README.md").read_text()
    )


def test_a_slower_kfac_is_a_no_that_names_the_break_even(tmp_path: Path, no_images: None) -> None:
    slower = EPOCHS | {"comm_opt": 8, "dp_kfac": 7}
    archive(tmp_path, "headline", {f"seed-{seed}": block(seed, slower) for seed in range(6)})
    assert main(["reproduce", "headline"]) == 0
    assert first_sentence(tmp_path).startswith("**No**: ")  # dp_kfac: 7 epochs of 1.2 s against 6 of 1 s
    assert "K-FAC (`dp_kfac`) needs 40% more time" in first_sentence(tmp_path)
    least, most = re.search(r"\(95 % interval: (\d+)% to (\d+)%\)", first_sentence(tmp_path)).groups()
    assert int(least) <= 40 <= int(most)
    text = (tmp_path / "results/headline/README.md").read_text()
    assert "1.17 times the epochs, each takes 1.20 times as long; it would break even at 0.86 times" in text


def test_a_point_of_one_run_is_not_named_as_the_nearest_to_the_goal(tmp_path: Path, no_images: None) -> None:
    slower = EPOCHS | {"comm_opt": 8, "dp_kfac": 7}
    archive(tmp_path, "headline", {f"seed-{seed}": block(seed, slower) for seed in range(6)})
    larger = {"training.global_batch_size": 128}
    archive(tmp_path, "headline-128", {"128-seed-9": [replace(run, patch=larger) for run in block(9)]})
    assert main(["reproduce", "headline"]) == 0
    text = (tmp_path / "results/headline/README.md").read_text()
    assert (
        "(its network, batch 128, float32, 2 ranks), K-FAC (`comm_opt`) takes 45% less time (no interval"
        in text
    )
    assert "The nearest is `dp_kfac` (its network, batch 64, float32, 2 ranks): a speed-up of 0.71;" in text


def test_a_better_baseline_than_sgd_leaves_the_papers_comparison_on_the_page(
    tmp_path: Path, no_images: None
) -> None:
    faster = EPOCHS | {"nlcg": 2}  # 2 epochs of 2 s, SGD 6 of 1 s, comm_opt 3 of 1.1 s
    archive(tmp_path, "headline", {f"seed-{seed}": block(seed, faster) for seed in range(6)})
    assert main(["reproduce", "headline"]) == 0
    assert "less time" in first_sentence(tmp_path)
    assert "`nlcg`" in first_sentence(tmp_path)
    text = (tmp_path / "results/headline/README.md").read_text()
    assert "Against `sgd` alone, with which the papers compare: 45% less time (95 % interval" in text


def test_where_sgd_s_median_run_misses_the_page_says_so_and_the_figure_keeps_its_row(
    tmp_path: Path, no_images: None
) -> None:
    faster = EPOCHS | {"nlcg": 2}
    runs = {seed: block(seed, faster) for seed in range(6)}
    missing = {
        f"seed-{seed}": [
            replace(run, misses=True) if run.method == "sgd" and seed < 3 else run for run in of_seed
        ]
        for seed, of_seed in runs.items()
    }
    archive(tmp_path, "headline", missing)
    assert main(["reproduce", "headline"]) == 0
    text = (tmp_path / "results/headline/README.md").read_text()
    assert (
        "Against `sgd` alone, with which the papers compare: no ratio, as a median run missed; "
        "runs that reached it: `sgd` in 3 of 6, `comm_opt` in 6 of 6." in text
    )
    drawn = pd.read_csv(tmp_path / "results/headline/headline.csv").set_index("arm")
    assert list(drawn.index) == ["sgd", "comm_opt", "dp_kfac"]
    assert pd.isna(drawn.loc["sgd", "speedup"])
    assert drawn.loc["sgd", "reached"] == 3


def test_the_arm_that_the_tuning_chose_is_judged_though_another_was_faster(
    tmp_path: Path, no_images: None
) -> None:
    archive(tmp_path, "headline-tuning", {"trial-01": block(100, EPOCHS | {"dp_kfac": 1})}, trial=1)
    archive(tmp_path, "headline-larger-tuning", {"larger-trial-01": block(102)}, trial=1)
    archive(tmp_path, "headline", {f"seed-{seed}": block(seed) for seed in range(6)})
    assert main(["reproduce", "headline"]) == 0
    assert "K-FAC (`dp_kfac`)" in first_sentence(tmp_path)
    text = (tmp_path / "results/headline/README.md").read_text()
    assert "For `headline`:" in text
    assert "For `headline-larger`, which has not been run:" in text


def test_the_second_round_answers_and_the_first_stays_on_the_page(tmp_path: Path, no_images: None) -> None:
    slower = EPOCHS | {"comm_opt": 8, "dp_kfac": 7}
    archive(tmp_path, "headline-tuning", {"trial-01": block(100, EPOCHS | {"dp_kfac": 1})}, trial=1)
    archive(tmp_path, "headline", {f"seed-{seed}": block(seed, slower) for seed in range(6)})
    archive(tmp_path, "headline-tuning-again", {"trial-01": block(101)}, trial=1)
    archive(tmp_path, "headline-again", {f"again-seed-{seed}": block(seed) for seed in range(10, 16)})
    assert main(["reproduce", "headline"]) == 0
    assert first_sentence(tmp_path).startswith("**Yes**: ")
    assert "K-FAC (`comm_opt`) reaches" in first_sentence(tmp_path)  # its own trials chose it
    table = pd.read_csv(tmp_path / "results/headline/speedup.csv").set_index(["study", "arm"])
    assert len(table) == 8
    assert table.loc[("headline", "comm_opt"), "speedup"] == pytest.approx(6 / 8.8)
    assert table.loc[("headline-again", "comm_opt"), "speedup"] == pytest.approx(6 / 3.3)
    assert [row for row, of in table.iterrows() if of["chosen"]] == [
        ("headline", "dp_kfac"), ("headline-again", "comm_opt"),
    ]  # fmt: skip
    assert len(pd.read_csv(tmp_path / "results/headline/trials.csv")) == 8
    assert "For `headline-again`:" in (tmp_path / "results/headline/README.md").read_text()
    assert set(pd.read_csv(tmp_path / "results/headline/rules.csv")["study"]) == {
        "headline",
        "headline-again",
    }


def test_an_interval_that_holds_no_difference_is_not_shown(tmp_path: Path, no_images: None) -> None:
    seeds = {f"seed-{seed}": [Run("sgd", 2, seed, 6, 1.0), Run("comm_opt", 2, seed, 6, 0.8 + 0.08 * seed)]
             for seed in range(6)}  # fmt: skip
    archive(tmp_path, "headline", seeds)
    assert main(["reproduce", "headline"]) == 0
    assert first_sentence(tmp_path).startswith("**Not shown**: ")
    assert "95 % interval of the saving" in first_sentence(tmp_path)


def test_two_runs_decide_nothing(tmp_path: Path, no_images: None) -> None:
    archive(tmp_path, "headline", {f"seed-{seed}": block(seed) for seed in range(2)})
    assert main(["reproduce", "headline"]) == 0
    assert first_sentence(tmp_path).startswith("**Not shown**: ")
    assert "no interval: too few runs" in first_sentence(tmp_path)


def test_the_files_are_the_same_when_drawn_again(tmp_path: Path) -> None:
    archive(tmp_path, "headline", {f"seed-{seed}": block(seed) for seed in range(3)})
    folder = tmp_path / "results/headline"
    drawn = []
    for _ in range(2):
        assert main(["reproduce", "headline"]) == 0
        drawn.append({path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".xz"})
    assert drawn[0] == drawn[1]
    written = {"README.md", "speedup.csv", "runs.csv", "rules.csv", *(f"headline.{kind}" for kind in KINDS)}
    assert drawn[0].keys() == written
    rules = pd.read_csv(folder / "rules.csv").set_index("rule")
    assert rules.loc["first", "speedup"] == pytest.approx(6 / 3.3)
    assert rules.loc["algoperf-style", "speedup"] == pytest.approx(6 / 3.3)  # medians over seeds
    assert pd.isna(rules.loc["mlperf-style", "low"])
    assert "Not scored: sustained" in (folder / "README.md").read_text()


def test_another_batch_size_is_a_sentence_of_its_own_with_its_own_target(
    tmp_path: Path, no_images: None
) -> None:
    archive(tmp_path, "headline", {f"seed-{seed}": block(seed) for seed in range(6)})
    larger = {"training.global_batch_size": 128, "target.at_least": 0.93}
    slower = EPOCHS | {"nlcg": 2}
    of_128 = {
        f"128-seed-{seed}": [replace(run, patch=larger) for run in block(seed, slower)] for seed in range(6)
    }
    archive(tmp_path, "headline-128", of_128)
    assert main(["reproduce", "headline"]) == 0
    parts = (tmp_path / "results/headline/README.md").read_text().split("\n\n")
    assert "(its network, batch 64, float32, 2 ranks)" in parts[1]
    assert "(digits: accuracy ≥ 0.95)" in parts[1]
    assert parts[2].startswith(
        "**Yes**: On digits (its network, batch 128, float32, 2 ranks), K-FAC (`comm_opt`)"
    )
    assert "(digits: accuracy ≥ 0.93)" in parts[2]
    assert "best tuned first-order method (`nlcg`)" in parts[2]
    assert " Against `sgd` alone, with which the papers compare: 45% less time" in parts[2]
    assert "digits: accuracy ≥ 0.95 at batch 64; digits: accuracy ≥ 0.93 at batch 128" in parts[5]
    assert "a later one replaces" not in parts[5]
