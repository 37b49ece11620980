"""The headline study's sweeps are fair as written: equal trials, seeds of their own, one task for all."""

from pathlib import Path

import pytest

from harness.study.choose import study_text
from harness.study.sweep import read_sweep

FOLDER = Path(__file__).parents[2] / "jobs/sweeps/headline"
TUNINGS = ("pilot", "tuning", "tuning-again", "batch-128-tuning", "batch-2048-pilot", "batch-2048-tuning")


def test_the_seeds_of_pilot_tuning_and_study_are_disjoint() -> None:
    used: dict[str, set[int]] = {}
    for name in TUNINGS:
        content = read_sweep(FOLDER / f"{name}.yaml").content
        assert content.tuning is not None
        used[name], study = set(content.all_seeds), content.tuning.study
        if name in {"tuning", "tuning-again", "batch-2048-tuning"}:
            used[f"study of {name}"] = set(study.seeds)
            assert len(used[f"study of {name}"]) == 6  # blocks
        if name.endswith("pilot"):
            used[f"{name} again"] = set(study.seeds)
    used["map"] = {cell.seed for cell in read_sweep(FOLDER / "map.yaml").cells}
    assert sum(map(len, used.values())) == len(set().union(*used.values()))


@pytest.mark.parametrize("name", TUNINGS)
def test_every_method_has_as_many_trials_of_one_task(name: str) -> None:
    sweep = read_sweep(FOLDER / f"{name}.yaml")
    assert sweep.content.tuning is not None
    trials = {method: len(points) for method, points in sweep.trials.items()}
    assert set(trials.values()) == {sweep.content.tuning.trials}
    tasks = set()
    for cell in sweep.cells:
        options = {k: v for k, v in cell.workload.options.items() if k != "label_smoothing"}
        tasks.add(
            (
                str(options),
                cell.target,
                cell.training.model_copy(update={"window_steps": None, "epochs": 5}),
                cell.world_size,
            )
        )
    assert len(tasks) == 1
    for trials in sweep.trials.values():
        assert all({"lr", "schedule"} <= trial["optimizer"].keys() for trial in trials)
        assert all("label_smoothing" in trial["workload"]["options"] for trial in trials)


def test_the_study_that_choose_would_write_has_every_arm_in_every_block(tmp_path: Path) -> None:
    sweep = read_sweep(FOLDER / "tuning.yaml")
    path = tmp_path / "headline.yaml"
    path.write_text(study_text(sweep, dict.fromkeys(sweep.trials, 1)))
    study = read_sweep(path).cells
    assert len({cell.method for cell in study}) == 9
    for size in (1, 2):
        for seed in range(6):
            of_block = [cell.method for cell in study if (cell.world_size, cell.seed) == (size, seed)]
            assert sorted(of_block) == sorted({cell.method for cell in study})
