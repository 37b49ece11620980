"""Every method gets the same number of trials, from the space that the file says, with seeds of their own.

`choose` takes the best of each by median time to the target, misses last, and only when all trials are there.
"""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import qmc

from analysis.comparisons import baselines
from analysis.records.loading import load
from analysis.records.study import Study
from analysis.tuning import by_method, trials
from harness.cell import Cell
from harness.cli import main
from harness.errors import SweepError
from harness.runs.store import sweep_folder
from harness.study.sweep import read_sweep
from harness.study.sweep.tuning import MOST_DIMENSIONS, sobol
from tests.analysis.hand_made import Run, write

TUNING = """\
sweep: tune
workload: digits
target: {metric: accuracy, at_least: 0.95}
training: {global_batch_size: 64, epochs: 12}
optimizer: {lr: 0.1}
world_size: 1
methods:
  - {name: sgd}
  - {name: comm_opt, kfac: {strategy: comm_opt}}
seeds: [100, 101]
tuning:
  trials: 4
  shared: {optimizer.lr: {log: [0.01, 1]}}
  space:
    sgd: {optimizer.momentum: {one_minus_log: [0.8, 0.99]}, optimizer.nesterov: [true, false]}
    comm_opt: {kfac.damping: {log: [0.001, 0.1]}, kfac.inverse_update_steps: {linear: [10, 40]}}
  study:
    sweep: study
    seeds: [0, 1, 2]
    about: of the best trials
    grid: {world_size: [1, 2]}
    also: [{name: mem_opt, like: comm_opt, kfac: {strategy: mem_opt}}]
"""


def sweep_file(folder: Path, text: str = TUNING) -> Path:
    path = folder / "tune.yaml"
    path.write_text(text)
    return path


def test_the_points_are_sobols_sequence_and_a_shift_keeps_every_dimension_even() -> None:
    own = np.array(list(islice(sobol(MOST_DIMENSIONS, -1), 256)))
    reference = qmc.Sobol(MOST_DIMENSIONS, scramble=False, bits=32).random(256)
    assert np.abs(own - reference).max() < 2**-32
    first, second = (np.array(list(islice(sobol(5, seed), 64))) for seed in (0, 1))
    counts = [np.histogram(column, bins=64, range=(0, 1))[0] for column in first.T]
    assert np.all(np.array(counts) == 1)  # one point in each 64th, in every dimension
    assert not np.allclose(first, second)


def test_every_method_gets_as_many_trials_within_its_ranges(tmp_path: Path) -> None:
    cells = read_sweep(sweep_file(tmp_path)).cells
    for method in ("sgd", "comm_opt"):
        own = [cell for cell in cells if cell.method == method]
        assert sorted((cell.trial, cell.seed) for cell in own) == [
            (n, s) for n in (1, 2, 3, 4) for s in (100, 101)
        ]
        rates = sorted({cell.optimizer.lr for cell in own})
        assert len(rates) == 4
        quarters = np.floor((np.log10(rates) + 2) * 2)  # of the logarithmic range, one trial in each
        assert list(quarters) == [0, 1, 2, 3]
    assert {cell.optimizer.nesterov for cell in cells if cell.method == "sgd"} == {True, False}
    rest = sorted({1 - cell.optimizer.momentum for cell in cells if cell.method == "sgd"})
    assert list(np.floor(4 * np.log(np.array(rest) / 0.01) / np.log(20))) == [0, 1, 2, 3]
    intervals = {cell.kfac.inverse_update_steps for cell in cells if cell.kfac}
    assert all(type(steps) is int and 10 <= steps <= 40 for steps in intervals)


def test_ids_of_trials_do_not_depend_on_their_number_and_stay_what_they_are(tmp_path: Path) -> None:
    cells = read_sweep(sweep_file(tmp_path)).cells
    other = Cell.model_validate({**cells[0].model_dump(), "trial": 9})
    assert other.id == cells[0].id
    assert [cell.id for cell in cells if cell.seed == 100][:2] == [  # another id renames stored trials
        "sgd-p1-s100-523adfcfaa",
        "sgd-p1-s100-4325025e75",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("trials: 4", "trials: 1", "tune.yaml:12: tuning.trials must be >= 2, got 1"),
        ("{optimizer.lr: {log", "{optimizer: {log", "is a section; tune its fields, such as optimizer.name"),
        ("seeds: [0, 1, 2]", "seeds: [2, 101]", "must be others than those of the trials of tune, got 101"),
        ("sweep: study", "sweep: tune", "tuning.study.sweep='tune' is this sweep"),
        ("seeds: [100, 101]\n", "repeats: 2\n", "seeds must be listed in a sweep that tunes"),
        ("{log: [0.01, 1]}", "{log: [0.1, 0.1]}", "must be ascending, so that something is searched"),
        ("{log: [0.01, 1]}", "{log: [0, 1]}", "must be > 0 for a logarithmic range"),
        ("{log: [0.01, 1]}", "{uniform: [0, 1]}", "or a list of choices, got uniform"),
        ("[true, false]", "[true]", "has fewer than two choices, so nothing is searched"),
        ("[true, false]", "[true, true]", "optimizer.nesterov[1]=True repeats item 0"),
        ("optimizer.nesterov:", "optimizer.nesterow:", "did you mean nesterov?"),
        ("optimizer.nesterov:", "kfac.damping:", "kfac.damping[0] has no effect without a kfac section"),
        ("optimizer.nesterov: [true, false]", "optimizer.decay_factor: [0.1, 0.2]", "without decay_epochs"),
        ("optimizer.nesterov: [true, false]", "target.at_least: [0.1, 0.2]", "not a hyperparameter; tunable"),
        ("optimizer.nesterov: [true, false]", "optimizer.nesterov: {linear: [0, 1]}", "is not a number"),
        ("{linear: [10, 40]}", "{linear: [10.5, 40]}", "must be whole numbers, as kfac.inverse"),
        ("    sgd: {opt", "    sdg: {opt", "tuning.space.sdg is not a method; allowed: sgd, comm_opt"),
        ("like: comm_opt", "like: mem_opt", "like='mem_opt' is not a tuned method"),
        ("{name: mem_opt, like", "{like", "tuning.study.also[0].name is missing"),
        ("    sweep: study", "    sweep: 2026", "tuning.study.sweep must be text in quotes, got 2026"),
        ("{world_size: [1, 2]}\n    also", "[1, 2]\n    also", "tuning.study.grid must be a mapping"),
        ("world_size: 1", "grid: {world_size: [1, 2]}", "has several points, and trials are all at one"),
        ("world_size: 1", "world_size: 1\nexclude: []", "exclude must not be combined with `tuning`"),
        ("world_size: 1", "world_size: 1\ngrid: {optimizer.lr: [0.1]}", "which is an axis of the file"),
        ("  shared: {optimizer.lr: {log: [0.01, 1]}}\n  space:\n    sgd: {optimizer.momentum: "
         "{one_minus_log: [0.8, 0.99]}, optimizer.nesterov: [true, false]}",
         "  shared: {}\n  space:\n    sgd: {optimizer.nesterov: [true, false]}",
         "tuning.trials=4 is more than the 2 settings of method sgd"),
        ("  study:\n    sweep", "  studie:\n    sweep", "tuning.studie is not a known key; allowed: trials"),
    ],
)  # fmt: skip
def test_a_tuning_that_searches_nothing_or_is_unfair_is_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert TUNING.count(old) >= 1
    with pytest.raises(SweepError) as error:
        read_sweep(sweep_file(tmp_path, TUNING.replace(old, new, 1)))
    assert message in str(error.value)


def test_a_study_refuses_the_seeds_of_its_trials(tmp_path: Path) -> None:
    study = TUNING.split("tuning:", maxsplit=1)[0].replace("sweep: tune", "sweep: study")
    path = tmp_path / "study.yaml"
    path.write_text(study + "tuned: {sweep: tune, trials: 4, seeds: [101]}\n")
    with pytest.raises(SweepError, match="seeds must be others than those of the trials of tune, got 101"):
        read_sweep(path)
    assert len(read_sweep(path, ["seeds=[0]"]).cells) == 2
    with pytest.raises(SweepError, match=r"optimizer\.lr cannot also be --set"):
        read_sweep(sweep_file(tmp_path), ["optimizer.lr=0.5"])


def fabricated(folder: Path, *, leave_out: str = "", foreign: dict[str, float] | None = None) -> Path:
    """Trials whose times are known: SGD's second is the best; of K-FAC's one misses, the third is best."""
    path = sweep_file(folder)
    epochs = {("sgd", 1): 9, ("sgd", 2): 3, ("sgd", 3): 5, ("sgd", 4): 7,
              ("comm_opt", 1): 8, ("comm_opt", 2): 6, ("comm_opt", 3): 2}  # fmt: skip
    stored = sweep_folder("tune", folder / "runs")
    for cell in read_sweep(path).cells:
        if f"{cell.method} {cell.trial}" == leave_out:
            continue
        needed = epochs.get((cell.method, cell.trial or 0), 12)
        misses = (cell.method, cell.trial) == ("comm_opt", 4)
        others = (foreign or {}).get(f"{cell.method} {cell.trial}", 0.0)
        run = Run(
            cell.method, 1, cell.seed, needed + (cell.seed == 101), 1.0, misses=misses, foreign=others
        )  # fmt: skip
        write(stored.stage(cell).new_attempt(), cell, run)
    return path


def test_trials_are_ranked_by_median_time_and_the_median_trial_has_a_regret(tmp_path: Path) -> None:
    fabricated(tmp_path)
    study = load(tmp_path / "runs" / "tune")
    best = trials(study).query("place == 1").set_index("method")
    assert best["trial"].to_dict() == {"sgd": 2, "comm_opt": 3}
    assert best["median_seconds"].to_dict() == {"sgd": 3.5, "comm_opt": 2.5}
    last = trials(study).query("method == 'comm_opt'").iloc[-1]
    assert (last["trial"], last["reached"], last["median_seconds"]) == (4, 0, np.inf)
    methods = by_method(study).set_index("method")
    assert methods.loc["sgd", "regret"] == pytest.approx(6.5 / 3.5)  # of 3.5, 5.5, 7.5 and 9.5 s
    assert methods.loc["comm_opt", "regret"] == pytest.approx(7.5 / 2.5)  # of 2.5, 6.5, 8.5 s and a miss
    assert methods.loc["sgd", "spent_seconds"] == 2 * (3 + 5 + 7 + 9) + 4
    assert baselines(study) == {}  # a trial chooses a setting and is compared with nothing


def test_seconds_come_before_values_and_among_misses_the_best_value_is_first(tmp_path: Path) -> None:
    fabricated(tmp_path)
    study = load(tmp_path / "runs" / "tune")
    number = (
        study.evaluations["run"].astype("str").map(study.cells.set_index("run")["trial"]).astype("float64")
    )
    values = study.evaluations["value"]
    better = study.evaluations.assign(value=values.where(values < 0.95, 0.95 + 0.01 * number))
    assert _order(replace(study, evaluations=better), "sgd") == [2, 3, 4, 1]  # as by their seconds
    missed = study.evaluations.assign(value=0.5 + 0.1 * number)
    assert _order(replace(study, evaluations=missed), "sgd") == [4, 3, 2, 1]
    waiting = study.cells.assign(state=study.cells["state"].where(study.cells["trial"] != 2, "STAGED"))
    assert _order(replace(study, cells=waiting), "sgd") == [3, 4, 1, 2]  # not run: last


def _order(study: Study, method: str) -> list[int]:
    return trials(study).query(f"method == {method!r}")["trial"].tolist()


def test_choose_writes_the_study_with_the_best_settings_and_fresh_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fabricated(tmp_path)
    tuned = {(cell.method, cell.trial): cell for cell in read_sweep(path).cells}
    assert main(["choose", "-f", str(path), "--runs", str(tmp_path / "runs")]) == 0
    study = read_sweep(tmp_path / "study.yaml")
    assert study.about == "of the best trials"
    assert {cell.seed for cell in study.cells} == {0, 1, 2}
    assert {cell.world_size for cell in study.cells} == {1, 2}
    settings = {cell.method: (cell.optimizer, cell.kfac) for cell in study.cells}
    assert settings["sgd"] == (tuned["sgd", 2].optimizer, None)
    assert settings["comm_opt"] == (tuned["comm_opt", 3].optimizer, tuned["comm_opt", 3].kfac)
    optimizer, kfac = settings["mem_opt"]
    assert kfac is not None
    assert (optimizer, kfac.strategy) == (tuned["comm_opt", 3].optimizer, "mem_opt")
    assert kfac.damping == settings["comm_opt"][1].damping  # type: ignore[union-attr]
    table = (tmp_path / "study.trials.csv").read_text().splitlines()
    assert len(table) == 1 + 8
    assert "1.86×" in capsys.readouterr().out


def test_trials_can_be_chosen_by_another_target_which_is_then_the_studys(tmp_path: Path) -> None:
    path = fabricated(tmp_path)
    trial = {(cell.method, cell.trial): cell.optimizer for cell in read_sweep(path).cells}
    assert main(["choose", "-f", str(path), "--runs", str(tmp_path / "runs"), "--target", "0.1"]) == 0
    cells = read_sweep(tmp_path / "study.yaml").cells
    assert {cell.target.at_least for cell in cells} == {0.1}
    assert {cell.optimizer for cell in cells if cell.method == "sgd"} == {trial["sgd", 1]}  # as fast as all


def test_choose_names_the_trials_that_only_other_processes_may_have_kept_from_the_first_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # the best of SGD takes 3.5 s; the third 5.5 and the fourth 7.5
    path = fabricated(tmp_path, foreign={"sgd 3": 0.4, "sgd 4": 0.4, "comm_opt 4": 0.9})
    assert main(["choose", "-f", str(path), "--runs", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().err
    assert "warning: sgd: trial 3 took 5.5 s while others had 40% of its CPUs" in said
    assert "may be ahead of trial 2 (3.5 s), the best" in said
    assert "kronscale retry tune --disturbed" in said
    assert said.count("warning:") == 1


def test_choose_needs_every_trial_and_writes_nothing_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fabricated(tmp_path, leave_out="comm_opt 2")
    command = ["choose", "-f", str(path), "--runs", str(tmp_path / "runs")]
    assert main(command) == 2
    assert "2 of 16 runs of trials have not completed, such as comm_opt-p1-s100-" in capsys.readouterr().err
    assert not (tmp_path / "study.yaml").exists()
    assert main([*command, "--methods", "sgd"]) == 0
    assert {cell.method for cell in read_sweep(tmp_path / "study.yaml").cells} == {"sgd"}


def test_nothing_is_chosen_after_a_run_of_the_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fabricated(tmp_path)
    command = ["choose", "-f", str(path), "--runs", str(tmp_path / "runs")]
    assert main(command) == 0
    assert main(command) == 2
    assert "study.yaml exists; remove it to choose again" in capsys.readouterr().err
    cell = read_sweep(tmp_path / "study.yaml").cells[0]
    sweep_folder("study", tmp_path / "runs").stage(cell)
    (tmp_path / "study.yaml").unlink()
    assert main(command) == 2
    assert "has runs of the study already" in capsys.readouterr().err


@pytest.mark.slow
def test_the_report_of_trials_has_their_tables_and_compares_nothing(tmp_path: Path, no_images: None) -> None:
    fabricated(tmp_path)
    assert main(["report", "tune", "--runs", str(tmp_path / "runs")]) == 0
    text = (tmp_path / "runs" / "tune" / "report" / "report.md").read_text()
    assert "Nothing is compared: these runs are trials" in text
    assert "| sgd | 4 | 4 of 4 | 3.5 | 6.5 | 9.5 | 1.86× | 0.8667 |" in text
    assert "| comm_opt | 4 | 3 of 4 | 2.5 | 7.5 | missed | 3.00× |" in text
