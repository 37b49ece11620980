"""Promise: every mistake in a sweep file is one error line that names file, line and field."""

from pathlib import Path

import pytest

from harness.cli import main

GOOD = """\
sweep: good
workload: digits
target: {metric: accuracy, at_least: 0.97}
training: {global_batch_size: 128, epochs: 30}
optimizer: {lr: 0.1}
methods:
  - {name: sgd}
  - {name: hybrid, kfac: {strategy: hybrid_opt, grad_worker_fraction: 0.5}}
grid: {world_size: [2, 4]}
repeats: 1
"""

UNKNOWN_KEY = (
    ":10: repeat is not a known key; allowed: sweep, about, workload, target, training, optimizer, kfac, "
    "world_size, methods, grid, zip, exclude, repeats, seeds, tuning, tuned; did you mean repeats?"
)
# Text to replace in the good file, its replacement, and what the message says after the file's name: the
# first three whole, of the others where the mistake is, what was wrong and what would be right.
MISTAKES = [
    ("repeats: 1", "repeat: 1", UNKNOWN_KEY),
    ("fraction: 0.5", "fraction: 0.3",
     ":8: methods[1].kfac.grad_worker_fraction=0.3 gives 0.6 gradient workers in a world of 2; use a "
     "fraction that gives a whole number dividing 2: 1/2, 2/2 (method hybrid, world_size=2)"),
    ("repeats: 1", "exclude: [{method: sdg}]",
     ":10: exclude[0].method='sdg' is not a method; allowed: sgd, hybrid; did you mean sgd?"),
    ("epochs: 30", "epoch: 30", ":4: training.epoch is not a field of training; allowed:"),
    ("strategy: hybrid_opt, grad_worker_fraction: 0.5", "strategy: comm_op",
     ":8: methods[1].kfac.strategy='comm_op' is not one of comm_opt, mem_opt, "),
    ("[2, 4]", "[2, 0]", ":9: grid.world_size[1] must be >= 1, got 0"),
    ("[2, 4]", "[2, 2.5]", ":9: grid.world_size[1] must be a whole number, got 2.5"),
    ("lr: 0.1", "lr: '0.1'", ":5: optimizer.lr must be a number, got '0.1'"),
    ("lr: 0.1", "lr: 1e999", ":5: optimizer.lr must be a finite number, got inf"),
    ("batch_size: 128", "batch_size: 1440", ":4: training.global_batch_size=1440 makes a global batch of"),
    ("batch_size: 128", "batch_size: 128, local_batch_size: 32",
     ":4: training needs exactly one of global_batch_size (strong scaling) and local_batch_size "),
    ("{name: sgd}", "{name: sgd}\n  - {name: also}", ":8: methods[1]: cell also-p2-s0-2685787740 computes"),
    ("[2, 4]", "[2, 2]", ":9: grid.world_size[1]=2 repeats item 0 of the list"),
    ("target: {metric: accuracy, at_least: 0.97}", "", ":1: target is missing (method sgd, world_size=2)"),
    ("metric: accuracy", "metric: acuracy", ":3: target.metric='acuracy' is not a metric of digits;"),
    ("at_least: 0.97", "at_most: 0.97", ":3: target.at_most=0.97 contradicts accuracy, where higher is"),
    ("workload: digits", "workload: digit", ":2: workload='digit' is not a workload; allowed: digits,"),
    ("workload: digits", "workload: {name: digits, options: {widht: 8}}",
     ":2: workload.options.widht=8 is not an option of this workload; allowed: width, network; did you "),
    ("workload: digits", "workload: {name: digits, options: {width: wide}}",
     ":2: workload.options.width must be a whole number, got 'wide' (default 16)"),
    ("workload: digits", "workload: {name: cifar10, options: {train_examples: 50001}}",
     ":2: workload.options.train_examples=50001 is not allowed; use 0 for all, or 1 to 50000"),
    ("name: hybrid", "name: sgd", ":8: methods[1].name='sgd' is already the name of methods[0]"),
    ("{name: sgd}", "{}", ":7: methods[0].name is missing"),
    ("sweep: good", "sweep: a/b", ":1: sweep must be a name of up to 64 letters, digits, "),
    ("strategy: hybrid_opt", "damping: {initial: 0.1, factor: 0.5}, strategy: hybrid_opt",
     ":8: methods[1].kfac.damping.at is missing"),
    ("{name: hybrid,", "{name: hybrid, optimizer: {name: nlcg},",
     ":8: methods[1].kfac.grafting=true would scale the steps of nlcg; write only grafting: false "),
    ("{name: hybrid, kfac: {", "{name: hybrid, optimizer: {name: nlcg}, kfac: {kl_clip: 0.01, ",
     ":8: methods[1].kfac.kl_clip=0.01 would scale the steps of nlcg; write only grafting: false "),
    ("repeats: 1", "exclude: [{method: sgd, world_size: 3}]",
     ":10: exclude[0] matches no cell: method=sgd, world_size=3"),
    ("grid: {world_size: [2, 4]}", "", ":1: world_size is missing (method sgd)"),
    ("repeats: 1", "exclude: [{method: sgd}, {method: hybrid}]", ":1: no cell is left: exclude and the"),
    ("repeats: 1", "zip: [{optimizer.lr: [1, 2], training.epochs: [1]}]",
     ":10: zip[0] has lists of unequal length: optimizer.lr has 2, training.epochs has 1"),
    ("repeats: 1", "zip: {optimizer.lr: [1, 2]}", ":10: zip must be a list, got a mapping"),
    ("repeats: 1", "seeds: [3, 3]", ":10: seeds must be different whole numbers, got [3, 3]"),
    ("repeats: 1", "repeats: 100000", ":9: grid expands to 400,000 cells; at most 100,000 are allowed"),
    ("repeats: 1", "sweep: again", ":10: sweep is given twice, first on line 1"),
]  # fmt: skip
FILES = [
    ("# nothing\n", ":1: the file is empty"),
    ("- sgd\n", ":1: the top level is a list, not a mapping of keys to values"),
    ("sweep: [a\nb: 1\n", ":2: not readable as YAML: did not find expected ',' or ']'"),
    ("sweep: a\n---\nsweep: b\n", ":2: not readable as YAML: but found another document"),
    ("sweep: &a [*a]\n", ":1: sweep[0] contains itself through an alias"),
    ("sweep: !!python/name:os.system x\n", ":1: "),
    ("1: a\n", ":1: key '1' must be text"),
    ("sweep: a\nmethods: []\n", ":2: methods must have 1 or more entries, got []"),
]


@pytest.mark.parametrize(("before", "after", "message"), MISTAKES)
def test_a_mistake_is_one_line_with_exit_code_2_and_nothing_written(
    before, after, message, tmp_path, monkeypatch, capsys
):
    assert GOOD.count(before) >= 1
    said = _error(GOOD.replace(before, after), tmp_path, monkeypatch, capsys)
    assert said.startswith(message)
    if (before, after, message) in MISTAKES[:3]:
        assert said == message


@pytest.mark.parametrize(("text", "message"), FILES)
def test_a_file_that_is_not_a_mapping_is_one_line(text, message, tmp_path, monkeypatch, capsys):
    got = _error(text, tmp_path, monkeypatch, capsys)
    assert got.startswith(message)
    assert "python" not in text or "tags are not allowed" in got


def test_with_several_workloads_an_error_names_the_one_that_it_is_about(tmp_path, monkeypatch, capsys):
    text = GOOD.replace("workload: digits\ntarget: {metric: accuracy, at_least: 0.97}\n", "")
    text += (
        "zip:\n  - workload: [digits, cifar10]\n    training.epochs: [30, 6]\n"
        "    target: [{metric: accuracy, at_least: 0.97}, {metric: accuracy, at_least: 0.2}]\n"
    )
    late = text.replace("fraction: 0.5", "fraction: 0.5, damping: {initial: 0.1, factor: 0.5, at: [8]}")
    assert _error(late, tmp_path, monkeypatch, capsys) == (
        ":6: methods[1].kfac.damping.at=[8.0] has no milestone in the 6 epochs with K-FAC "
        "(method hybrid, world_size=2, workload cifar10)"
    )


def test_a_missing_file_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "-f", "none.yaml"]) == 2
    assert capsys.readouterr().err == "error: none.yaml: no such file\n"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "training.epoch=5",
            " --set training.epoch is not a field of training; allowed: global_batch_size, ",
        ),
        ("training.epochs=five", " --set training.epochs must be a whole number, got 'five'"),
        ("training.epochs", " --set training.epochs: write field=value, such as training.epochs=5"),
        ("world_size=8", "9: grid.world_size[0] is an axis of the file; world_size cannot also be --set"),
    ],
)
def test_a_mistaken_override_is_one_line(override, message, tmp_path, monkeypatch, capsys):
    got = _error(GOOD, tmp_path, monkeypatch, capsys, "--set", override)
    assert got.startswith(f":{message}")


def _error(text: str, folder: Path, monkeypatch, capsys, *options: str) -> str:
    monkeypatch.chdir(folder)
    (folder / "x.yaml").write_text(text)
    assert main(["plan", "-f", "x.yaml", *options]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["x.yaml"]
    return output.err.removeprefix("error: x.yaml").removesuffix("\n")
