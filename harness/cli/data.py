"""`kronscale data`: what a workload reads, whether it is there, and how to bring it into shape."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.command import Command
from harness.cli.options import FileInstead
from harness.cli.output import print_findings
from harness.errors import UserError
from harness.study.sweep import read_sweep
from harness.workloads import WORKLOADS
from harness.workloads.imagenet import image_folders as imagenet
from harness.workloads.sources.folders import build_shard, data_folder

if TYPE_CHECKING:
    from harness.doctor.findings import Finding

commands = typer.Typer(help="Check and prepare the files that workloads read.", no_args_is_help=True)

_OF_FILES = {
    "data", "classes", "train_examples", "test_examples", "year", "test_patients", "train_text", "test_text",
    "source", "target",
}  # fmt: skip

_Folder = Annotated[
    str | None,
    typer.Option("--data", metavar="DIR", help="Folder of the files. Default: KRONSCALE_DATA, else data."),
]


@commands.command(cls=Command, epilog="Example: kronscale data check imagenet --data /project/imagenet")
def check(
    name: Annotated[
        str | None, typer.Argument(metavar="[WORKLOAD]", help="Name of the workload.", show_default=False)
    ] = None,
    file: FileInstead = None,
    data: _Folder = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option", metavar="NAME=VALUE", help="Option of the workload: classes=10. May be repeated."
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Read every image, not 200 of each split.")] = False,
) -> None:
    """Check layout, number, checksums and readability of the files of a workload, or of those of a sweep.

    Writes nothing. Exit code 1 on a fault.
    """
    from harness.doctor.data import SAMPLE, check_data  # noqa: PLC0415  slow to load
    from harness.doctor.findings import any_fault  # noqa: PLC0415

    if file is not None and options:
        raise UserError("--option has no effect with --file: its cells set the options")
    if (name is None) == (file is None):
        raise UserError("give either a workload or a sweep's file: kronscale data check cifar10")
    asked = workloads_of(file) if file is not None else [(str(name), _options(str(name), options or []))]
    findings: list[Finding] = []
    for workload, given in asked:
        card = WORKLOADS[workload]
        merged = {**card.options, **given, **({"data": data} if data else {})}
        findings += check_data(workload, merged, None if every else SAMPLE)
        typer.echo(f"{workload}: {card.about}")
    print_findings(findings)
    if any_fault(findings):
        raise typer.Exit(1)


@commands.command(cls=Command, epilog="Example: kronscale data prepare imagenet --data /project/imagenet")
def prepare(
    name: Annotated[str, typer.Argument(metavar="WORKLOAD", help="imagenet or coco.", show_default=False)],
    data: _Folder = None,
    shards: Annotated[
        bool, typer.Option("--shards", help="Also pack each split into one tar, which nodes stage faster.")
    ] = False,
) -> None:
    """Bring published files into the layout that a workload reads; repeating it continues.

    ImageNet: unpacks the published tars into folders of classes and sorts the validation images by the
    development kit's ground truth. COCO: only shards.
    """
    root, began = data_folder(data or "files"), time.perf_counter()
    if name == "imagenet":
        parts = ["train", "val"]
        if (root / imagenet.TRAIN_TAR).is_file():
            typer.echo(f"{imagenet.unpack_training(root)} classes unpacked into {root / 'train'}")
        typer.echo(f"{imagenet.sort_validation(root)} images sorted into {root / 'val'}")
    elif name == "coco" and shards:
        parts = [path.name for path in sorted(root.glob("*20[0-9][0-9]")) if path.is_dir()]
        if not parts:
            raise UserError(f"{root} has no folders such as train2017")
    else:
        raise UserError(
            f"{name} is read as it is published; only imagenet, and coco with --shards, are prepared"
        )
    for part in parts if shards else ():
        shard = build_shard(root / part)
        size = (root / f"{part}.tar").stat().st_size
        typer.echo(f"{root / f'{part}.tar'}: {size / 1e6:.1f} MB{'' if shard else ', was there'}")
    typer.echo(f"took {time.perf_counter() - began:.1f} s; now: kronscale data check {name} --data {root}")


def workloads_of(file: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """The different data of a sweep's cells: names of workloads, with the options that say which files."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for cell in read_sweep(file, ()).cells:
        options = {key: value for key, value in cell.workload.options.items() if key in _OF_FILES}
        one = (cell.workload.name, options)
        if one not in found:
            found.append(one)
    return found


def _options(name: str, words: list[str]) -> Mapping[str, Any]:
    if name not in WORKLOADS:
        raise UserError(f"{name!r} is not a workload; there are {', '.join(WORKLOADS)}")
    defaults, given = WORKLOADS[name].options, {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in defaults:
            raise UserError(f"--option {word!r} must be NAME=VALUE, with a name of {', '.join(defaults)}")
        kind = type(defaults[key])
        if kind is bool and value not in ("true", "false"):
            raise UserError(f"--option {word!r}: {key} must be true or false, got {value!r}")
        try:
            given[key] = value == "true" if kind is bool else kind(value)
        except ValueError:
            raise UserError(f"--option {word!r}: {key} must be of type {kind.__name__}") from None
    return given
