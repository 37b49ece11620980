"""Promise: a BERT starts from a run's or Hugging Face's weights, or every weight that differs is named."""

from __future__ import annotations

import pickle

import pytest
import torch

from harness.errors import DataError
from harness.workloads.models.language import bert
from harness.workloads.models.weights import OWN_FILE, find_weights, load_start, save_weights
from tests.harness.workloads.texts import options

SIZES = {"next_sentence": True, "sequence_length": 10, "positions": 16}
FORMS = ("model.safetensors", "pytorch_model.bin")


def sizes(start="", **changes):
    return {**options("bert", "synthetic", **{**SIZES, **changes}), "start": str(start)}


def made(seed=0, **changes):
    torch.manual_seed(seed)
    return bert(sizes(**changes))


def published(model, form, folder):
    """What Hugging Face's library writes, or wrote before safetensors."""
    if form == "model.safetensors":
        model.save_pretrained(folder)
    else:
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        state = dict(model.state_dict())
        for name in list(state):
            for now, before in old.items():
                if name.endswith(now):
                    state[name.removesuffix(now) + before] = state.pop(name)
        state["bert.embeddings.position_ids"] = torch.arange(16)[None]
        torch.save(state, folder / form)
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_hugging_face_are_taken_from_either_file(tmp_path, form, tied):
    theirs, ours = made(1, tied=tied), made(2, tied=tied)
    folder = published(theirs, form, tmp_path)
    assert (folder / form).is_file()
    load_start(ours, sizes(folder, tied=tied))
    assert all(torch.equal(ours.state_dict()[name], each) for name, each in theirs.state_dict().items())


def test_weights_of_a_run_are_those_of_its_newest_attempt(tmp_path):
    for number, seed in ((2, 1), (10, 3), (9, 4)):
        (tmp_path / f"attempt-{number}").mkdir()
        save_weights(made(seed), tmp_path / f"attempt-{number}")
    (tmp_path / "attempt-11").mkdir()  # in progress
    assert find_weights(str(tmp_path)) == tmp_path / "attempt-10" / OWN_FILE
    ours, wanted = made(2), made(3).state_dict()
    load_start(ours, sizes(tmp_path))
    assert all(torch.equal(each, wanted[name]) for name, each in ours.state_dict().items())


MISMATCHES = {
    "longer positions": ({"positions": 32}, {}, "[32, 16]", "set workload.options.positions: 32, of which"),
    "shorter positions": (
        {"positions": 0}, {}, "position_embeddings.weight", "train the first phase with workload.options.pos",
    ),
    "heads that the model lacks": (
        {}, {"next_sentence": False}, 'Unexpected key(s) in state_dict: "bert.pooler.dense.weight"',
        "set workload.options.next_sentence: true",
    ),
    "heads that the file lacks": (
        {"next_sentence": False}, {}, 'Missing key(s) in state_dict: "bert.pooler.dense.weight"',
        "set workload.options.next_sentence: false",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISMATCHES)
def test_every_kind_of_mismatch_is_named_with_the_option_that_helps(tmp_path, case):
    of_file, of_model, reason, hint = MISMATCHES[case]
    save_weights(made(1, **of_file), tmp_path)
    with pytest.raises(DataError) as raised:
        load_start(made(2, **of_model), sizes(tmp_path, **of_model))
    assert f"{tmp_path / OWN_FILE} does not fit the model: " in str(raised.value)
    assert reason in str(raised.value)
    assert hint in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["cls.predictions.decoder.weight", "bert.pooler.dense.bias"])
def test_tied_weights_that_differ_and_numbers_that_are_not_finite_are_named(tmp_path, name):
    state = dict(made(1).state_dict())
    state[name] = state[name] + (1 if "decoder" in name else torch.inf)
    torch.save(state, tmp_path / "weights.bin")
    with pytest.raises(
        DataError, match=r"not finite, or tied in the model and different in the file: "
    ) as raised:
        load_start(made(2), sizes(tmp_path / "weights.bin"))
    assert ("word_embeddings" if "decoder" in name else name) in str(raised.value)


class Harmful:
    """A pickle that would write a file."""

    def __reduce__(self):
        return open, ("written-by-a-pickle", "w")


BAD = {
    "cut safetensors": ("model.safetensors", lambda file: file.read_bytes()[:-9], "cannot be read as"),
    "no safetensors": ("model.safetensors", lambda _: b"\xff" * 40, "cannot be read as weights"),
    "cut pickle": ("pytorch_model.bin", lambda file: file.read_bytes()[:900], "cannot be read as weights"),
    "a pickle that runs code": (
        "pytorch_model.bin", lambda _: pickle.dumps(Harmful(), 2),
        "it is damaged, or contains more than tensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_damaged_or_runs_code_is_one_line(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    form, spoil, message = BAD[case]
    file = published(made(1), form, tmp_path) / form
    file.write_bytes(spoil(file))
    with pytest.raises(DataError) as raised:
        load_start(made(2), sizes(file))
    assert f"{file} cannot be read as weights" in str(raised.value)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "written-by-a-pickle").exists()


def test_what_holds_no_state_dict_and_what_is_not_there_are_one_line(tmp_path):
    torch.save({"model": {"a": torch.ones(1)}}, tmp_path / "nested.bin")
    with pytest.raises(DataError, match="must hold tensors by name, as a state_dict"):
        load_start(made(), sizes(tmp_path / "nested.bin"))
    with pytest.raises(DataError, match="is neither a file of weights nor a folder with"):
        load_start(made(), sizes(tmp_path / "nowhere"))
