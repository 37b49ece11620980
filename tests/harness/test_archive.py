"""An archive is the runs: it loads to the same frames, notices damage, and several of a sweep are one."""

import hashlib
import io
import json
import re
import tarfile
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest

from analysis.records.loading import load
from analysis.records.study import FRAMES
from harness.cli import main
from harness.errors import StoreError
from harness.runs.archive import read_manifest, unpack, write_archive
from harness.runs.store import SweepFolder
from tests.analysis.hand_made import Run, hand_made, write


def runs_of(seeds: range, seconds: float = 1.0) -> list[Run]:
    return [Run(method, 1, seed, 3, seconds) for method in ("sgd", "comm_opt") for seed in seeds]


def archived(folder: Path, name: str, runs: list[Run]) -> Path:
    """A study of its own, as an archive."""
    hand_made(folder / name, runs)
    out = folder / f"{name}.tar.xz"
    assert main(["archive", "synthetic", "--runs", str(folder / name / "runs"), "--out", str(out)]) == 0
    return out


def test_an_archive_loads_to_the_same_frames_as_its_folder(tmp_path: Path) -> None:
    path = archived(tmp_path, "a", runs_of(range(3)))
    folder, archive = load(tmp_path / "a" / "runs" / "synthetic", cache=False), load(path)
    assert len(folder.cells) == 6
    for name in FRAMES:
        pd.testing.assert_frame_equal(getattr(folder, name), getattr(archive, name))
    pd.testing.assert_frame_equal(folder.cells.drop(columns="path"), archive.cells.drop(columns="path"))
    assert set(archive.cells["path"].str.partition(":")[0]) == {"a.tar.xz"}


def test_the_same_runs_give_the_same_bytes_and_the_manifest_lists_them(tmp_path: Path) -> None:
    path = archived(tmp_path, "a", runs_of(range(2)))
    again = tmp_path / "again.tar.xz"
    assert main(["archive", "synthetic", "--runs", str(tmp_path / "a" / "runs"), "--out", str(again)]) == 0
    assert path.read_bytes() == again.read_bytes()
    manifest = read_manifest(path)
    assert [(cell.method, cell.seed, cell.state) for cell in manifest.cells] == [
        ("comm_opt", 0, "COMPLETED"), ("comm_opt", 1, "COMPLETED"), ("sgd", 0, "COMPLETED"),
        ("sgd", 1, "COMPLETED"),
    ]  # fmt: skip
    assert sum(file.path.endswith("rank-00000.jsonl") for file in manifest.files) == 4


def test_archives_of_two_machines_are_one_study_and_a_cell_run_twice_is_refused(tmp_path: Path) -> None:
    paths = [
        archived(tmp_path, name, runs_of(range(1), seconds)) for name, seconds in (("a", 1.0), ("b", 2.0))
    ]
    paths.append(archived(tmp_path, "c", runs_of(range(2, 5))))  # of another machine
    both = load([paths[0], paths[2], paths[0]])  # the same file twice counts once
    assert sorted(both.cells.query("arm == 'sgd'")["seed"]) == [0, 2, 3, 4]
    with pytest.raises(StoreError, match=r"is another run than in a\.tar\.xz: a cell was run twice"):
        load(paths[:2])
    with pytest.raises(StoreError, match=r"cell synthetic/\S+ is in .* and in a\.tar\.xz:.*leave one"):
        load([tmp_path / "a" / "runs" / "synthetic", paths[0]])


def rewritten(path: Path, change: dict[str, bytes | None], *, extra: str = "") -> Path:
    """The archive with members changed, removed (None) or added."""
    out = path.with_name("changed.tar.xz")
    with tarfile.open(path) as old, tarfile.open(out, mode="w:xz") as new:
        contents = {one.name: old.extractfile(one).read() for one in old.getmembers()}  # type: ignore[union-attr]
        kept = {name: change.get(name, content) for name, content in contents.items()}
        for name, content in {**kept, **({extra: b"{}"} if extra else {})}.items():
            if content is not None:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                new.addfile(member, io.BytesIO(content))
    return out


def test_damage_is_noticed(tmp_path: Path) -> None:
    path = archived(tmp_path, "a", runs_of(range(1)))
    name = next(file.path for file in read_manifest(path).files if file.path.endswith(".jsonl"))
    with tarfile.open(path) as archive:
        content = archive.extractfile(name).read()  # type: ignore[union-attr]
    edited = content.replace(b'"value": 0.95', b'"value": 0.96')
    assert edited != content
    cases = {
        "does not have the checksum": rewritten(path, {name: edited}).read_bytes(),
        "is not as manifest.json lists it": rewritten(path, {name: content[:-1]}).read_bytes(),
        "1 files of manifest.json are missing": rewritten(path, {name: None}).read_bytes(),
        "'../../evil.json' is not as": rewritten(path, {}, extra="../../evil.json").read_bytes(),
        "must begin with manifest.json": rewritten(path, {"manifest.json": None}).read_bytes(),
        "is damaged or not an archive": path.read_bytes()[:-2000],
    }
    for message, damaged in cases.items():
        (tmp_path / "bad.tar.xz").write_bytes(damaged)
        with pytest.raises(StoreError, match=message.replace(".", r"\.")):
            unpack([tmp_path / "bad.tar.xz"], tmp_path / "out")
    manifest = asdict(read_manifest(path))
    for name in ("runs/synthetic/../../evil.json", "elsewhere/evil.json"):  # though the manifest lists it
        evil = {"path": name, "bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
        text = json.dumps({**manifest, "files": [*manifest["files"], evil]}).encode()
        with pytest.raises(StoreError, match="lies outside of the folders of an archive"):
            unpack([rewritten(path, {"manifest.json": text}, extra=name)], tmp_path / "out" / "runs")


def test_an_archive_is_verified_against_its_manifest_and_the_runs_own_checksums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = archived(tmp_path, "a", runs_of(range(2)))
    assert "it has no figures" in capsys.readouterr().out
    assert main(["archive", "--verify", str(path), "--verify", str(path)]) == 0
    line = f"{path}: sound; sweep synthetic, 4 cells, 4 of them COMPLETED, 20 files, 0 of them of the report"
    assert capsys.readouterr().out.splitlines() == [line, line]
    cut = tmp_path / "cut.tar.xz"
    cut.write_bytes(path.read_bytes()[:-200])
    assert main(["archive", "--verify", str(cut)]) == 2
    assert "is damaged or not an archive" in capsys.readouterr().err
    (records,) = (tmp_path / "a" / "runs" / "synthetic").glob("sgd-p1-s0-*/attempt-1/rank-00000.jsonl")
    records.write_bytes(records.read_bytes().replace(b'"value": 0.95', b'"value": 0.99'))
    edited = tmp_path / "edited.tar.xz"
    runs = str(tmp_path / "a" / "runs")
    assert main(["archive", "synthetic", "--runs", runs, "--out", str(edited)]) == 0
    assert main(["archive", "--verify", str(edited)]) == 2
    assert "does not match the checksum at its end: records were changed" in capsys.readouterr().err


def test_an_archive_that_was_not_finished_has_not_its_name(tmp_path: Path, monkeypatch) -> None:
    path = archived(tmp_path, "a", runs_of(range(1)))
    folder = SweepFolder(tmp_path / "a" / "runs" / "synthetic")
    real, written = tarfile.TarFile.addfile, []

    def full(archive, member, content):
        written.append(member.name)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        real(archive, member, content)

    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    with pytest.raises(OSError, match="No space left"):
        write_archive(folder, list(folder.cell_folders()), path.with_name("new.tar.xz"))
    assert not path.with_name("new.tar.xz").exists()


def test_runs_that_have_not_ended_are_not_archived(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hand_made(tmp_path, runs_of(range(2)))
    attempts = sorted((tmp_path / "runs" / "synthetic").glob("sgd-*/attempt-1"))
    (attempts[0] / "outcome.json").unlink()
    command = ["archive", "synthetic", "--runs", str(tmp_path / "runs")]
    assert main(command) == 2
    assert "not" in capsys.readouterr().err
    assert main([*command, "--where", "seed=1"]) == 0
    assert len(read_manifest(tmp_path / "archives" / "synthetic.tar.xz").cells) == 2
    assert main([*command, "--where", "seed=1"]) == 2
    assert "archives are not overwritten" in capsys.readouterr().err


def test_an_attempt_that_was_killed_with_its_supervisor_is_archived_with_the_next_one(tmp_path: Path) -> None:
    hand_made(tmp_path, [run := Run("sgd", 1, 0, 3, 1.0)])
    folder = SweepFolder(tmp_path / "runs" / "synthetic")
    (cell,) = folder.cell_folders()
    (cell.attempts()[0].path / "outcome.json").unlink()
    write(cell.new_attempt(), cell.cell(), replace(run, started=run.started + 1000))
    write_archive(folder, [cell], tmp_path / "a.tar.xz")
    direct, archive = load(folder.path, cache=False), load(tmp_path / "a.tar.xz")
    assert direct.cells.loc[0, ["state", "attempts"]].tolist() == ["COMPLETED", 2]
    for name in FRAMES:
        frames = [getattr(study, name).drop(columns="path", errors="ignore") for study in (direct, archive)]
        pd.testing.assert_frame_equal(*frames)


@pytest.mark.slow
def test_a_report_reads_archives_in_the_place_of_a_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        archived(tmp_path, name, [replace(run, oversubscribed=True) for run in runs_of(seeds)])
        for name, seeds in (("a", range(1)), ("b", range(1, 3)))
    ]
    options = [word for path in paths for word in ("--archive", str(path))]
    few = ("--figure", "scaling", "--figure", "memory")
    assert main(["report", *options, "--out", str(tmp_path / "page"), *few]) == 0
    printed = capsys.readouterr().out
    assert f"report: {tmp_path}/page/report.html\n" in printed
    assert re.search(r"speedup: Hodges-Lehmann on logs.*no interval", printed)
    text = (tmp_path / "page" / "report.md").read_text()
    assert "*: more ranks than CPUs, so their times say nothing about scaling" in printed
    assert "| sgd | 1* | 3 | 3 |" in text
    drawn = {path.stem for path in (tmp_path / "page" / "figures").iterdir()}
    assert drawn == {"scaling", "memory"}
    assert main(["report", *options, "--out", str(tmp_path / "other"), "--figure", "scalng"]) == 2
    assert "--figure='scalng' is not a figure" in (said := capsys.readouterr().err)
    assert "did you mean scaling?" in said
    assert not (tmp_path / "other").exists()
    assert main(["report", "--archive", str(tmp_path), "--out", str(tmp_path / "other")]) == 2
    assert "is a directory" in capsys.readouterr().err  # in the place of a report about no runs
    assert main(["report", *options]) == 2
    assert "--archive takes the place of a sweep and needs --out" in capsys.readouterr().err
