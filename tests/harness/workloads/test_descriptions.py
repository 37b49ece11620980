"""Promise: a login node reads every description without torch, and refuses options that cannot be."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from harness.cli import main
from harness.workloads import WORKLOADS

PROGRAM = """\
import sys
sys.modules["torch"] = None  # an import of it fails
import harness.workloads
print(sum(one.examples({}) > 0 for one in harness.workloads.WORKLOADS.values()))
"""


def test_registry_and_descriptions_import_no_torch():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "6\n"  # of bert, gpt and multi30k only the text tells


REFUSED = [
    ("cifar100", {"data": "embedded"}, "data='embedded' is a part of CIFAR-10"),
    (
        "cifar10",
        {"data": "embedded", "train_examples": 2001},
        "train_examples=2001 is not allowed; use 0 for",
    ),
    ("cifar10", {"width": 0.01}, "width=0.01 is not allowed: it makes 0.16 channels of 16"),
    ("imagenet", {"data": "embedded"}, "classes=1000 is not allowed with data='embedded', a part of"),
    ("imagenet", {"classes": 7}, "train_examples=0 means ImageNet's 1,281,167; with classes=7 give their"),
    ("imagenet", {"model": "inception_v3", "image_size": 70}, "image_size=70 is too small for the network"),
    ("coco", {"year": 2015}, "year=2015 is not allowed; use 2014 or 2017"),
    ("coco", {"classes": 3}, "train_examples=0 means COCO's 117,266; with classes=3 give their number"),
    (
        "coco",
        {"data": "embedded"},
        "classes=80 is not allowed with data='embedded', scenes of digits; use 10",
    ),
    ("poisson", {"dimensions": 3}, "dimensions=3 is not one of 2, 5"),
    ("coco", {"max_size": 700}, "max_size=700 must be at least min_size=800"),
    ("coco", {"trainable_layers": 6}, "trainable_layers=6 is not allowed; use 0 to 5"),
    ("coco", {"width": 0.0}, "width=0.0 is not allowed"),
    ("brain_mri", {"image_size": 40}, "image_size=40 is not allowed; use a multiple of 16"),
    (
        "brain_mri",
        {"data": "embedded"},
        "image_size=256 is not allowed with data='embedded'; the scenes have 96",
    ),
    ("brain_mri", {"data": "synthetic"}, "train_examples=0 is not allowed with data='synthetic'"),
    ("gpt", {"hidden": 100}, "hidden=100 must be a multiple of heads=12"),
    ("gpt", {"vocabulary": 200}, "vocabulary=200 is not allowed; use a value >= 256"),
    ("bert", {"vocabulary": 260}, "vocabulary=260 is not allowed; use a value >= 261"),
    (
        "bert",
        {"sequence_length": 7, "next_sentence": True},
        "sequence_length=7 is not allowed; use a value >=",
    ),
    ("bert", {"positions": 100}, "positions=100 is not allowed; use a value >= 128"),
    ("gpt", {"dropout": 1}, "dropout=1.0 is not allowed; use a value in [0, 1)"),
    ("multi30k", {"vocabulary": 258}, "vocabulary=258 is not allowed; use a value >= 259"),
    ("multi30k", {"target": "de"}, "target='de' must be another language than source"),
    (
        "multi30k",
        {"data": "embedded"},
        "data='embedded' has no parallel text; use files, synthetic or a folder",
    ),
    ("digits", {"width": 5000}, "width=5000 is not allowed; use a value <= 4096"),
    ("digits", {"widht": 5}, "widht=5 is not an option of this workload"),
    ("digits", {"width": "wide"}, "width must be a whole number, got 'wide' (default 16)"),
    ("bert", {"documents": "pages"}, "documents='pages' is not a known value"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_options_that_no_data_could_serve_are_refused(name, options, message):
    with pytest.raises(ValueError, match=r"^options\.") as raised:
        WORKLOADS[name].completed(options)
    assert message in str(raised.value)


SWEEP = """\
sweep: pairs
workload: {name: multi30k, options: {data: files, %s}}
target: {metric: %s}
training: {global_batch_size: 16, epochs: 1}
optimizer: {lr: 0.1}
methods: [{name: sgd}]
grid: {world_size: [1]}
repeats: 1
"""


@pytest.mark.parametrize(
    ("option", "target", "message"),
    [
        ("longest: 0", "loss, at_most: 3", "2: workload.options.longest=0 is not allowed; use a value >= 1"),
        ("layers: 2", "bleu, at_least: 30", "3: target.metric='bleu' needs workload.options.bleu: true"),
    ],
)
def test_they_are_refused_with_their_line_before_anything_runs(tmp_path, capsys, option, target, message):
    file = tmp_path / "s.yaml"
    file.write_text(SWEEP % (option, target))
    assert main(["plan", "-f", str(file)]) == 2
    assert f"{file}:{message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("cifar10", {}, 50_000), ("cifar10", {"data": "embedded"}, 2_000), ("imagenet", {}, 1_281_167),
        ("coco", {}, 117_266), ("coco", {"year": 2014}, 82_081),
        ("coco", {"data": "embedded", "classes": 10}, 400),
        ("brain_mri", {"data": "embedded", "image_size": 96}, 400), ("brain_mri", {}, 0), ("bert", {}, 0),
        ("gpt", {"data": "synthetic"}, 8192), ("multi30k", {"train_examples": 70}, 70),
    ],
)  # fmt: skip
def test_the_number_of_examples_is_known_where_the_options_say_it(name, options, count):
    assert WORKLOADS[name].examples(options) == count


def test_perplexity_is_e_to_the_mean_loss():
    description = WORKLOADS["gpt"]
    assert description.value("perplexity", {"loss": 2.0, "accuracy": 0.5}) == pytest.approx(math.e**2)
    assert description.value("accuracy", {"loss": 2.0, "accuracy": 0.5}) == 0.5
    assert math.isfinite(description.value("perplexity", {"loss": 1e6}))
