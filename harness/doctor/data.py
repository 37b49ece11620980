"""Checks whether the files that a workload reads are there, complete and readable."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.doctor.findings import Finding, fault, in_bytes, ok, warning
from harness.errors import DataError
from harness.workloads.description import EMBEDDED, SYNTHETIC
from harness.workloads.sources.folders import data_folder, how_to_point

SAMPLE = 200  # images that are read; --all reads every one

Options = Mapping[str, Any]


def check_data(name: str, options: Options, most: int | None = SAMPLE) -> list[Finding]:
    """Check the files of a workload; reads them, but writes nothing.

    Args:
        name: of the workload.
        options: of the workload, with defaults.
        most: how many images are read, spread over all; None for every one.
    """
    if name == "digits" or options["data"] in (EMBEDDED, SYNTHETIC):
        return [ok(f"{name}: files", "none are needed")]
    try:
        return _CHECKS[name](name, options, most)
    except (DataError, ModuleNotFoundError) as error:
        return [fault(f"{name}: files", str(error), "correct that, and check again")]


def read_sample(check: str, paths: Sequence[str], source: str, most: int | None) -> Finding:
    """Read images spread over all of them, and tell how long all would take."""
    from harness.workloads.sources.files import read_image  # noqa: PLC0415  loads Pillow

    step = max(1, len(paths) // most) if most else 1
    chosen = paths[::step]
    began, size, damaged = time.perf_counter(), 0, []
    for path in chosen:
        try:
            size += Path(path).stat().st_size
            read_image(path, source)
        except (OSError, DataError) as error:
            damaged.append(str(error))
    if damaged:
        found = f"{len(damaged)} of {len(chosen)} images that were read are damaged: {damaged[0]}"
        return fault(check, found, f"copy them again from {source}; --all names how many there are")
    rate = len(chosen) / max(time.perf_counter() - began, 1e-9)
    share = "all" if step == 1 else f"{len(chosen)} of"
    return ok(
        check,
        f"{share} {len(paths)} images read; about {in_bytes(size / len(chosen) * len(paths))} in all, "
        f"{rate:.0f} images/s in one process, so {len(paths) / rate / 60:.3g} minutes for all of them",
    )


def _check_cifar(name: str, options: Options, _: int | None) -> list[Finding]:
    from harness.workloads.cifar.cifar_files import VARIANTS, read_cifar  # noqa: PLC0415  loads numpy

    began = time.perf_counter()
    variant = VARIANTS[10 if name == "cifar10" else 100]
    train, test = read_cifar(variant, {**options, "download": False})
    size = train.pixels.nbytes + test.pixels.nbytes
    found = (
        f"{len(train.labels)} + {len(test.labels)} images of {variant.classes} classes, {in_bytes(size)}, "
        f"read in {time.perf_counter() - began:.2g} s"
    )
    return [ok(f"{name}: files", found)]


def _check_imagenet(name: str, options: Options, most: int | None) -> list[Finding]:
    from harness.workloads.imagenet.image_folders import SOURCE, VALIDATION_IMAGE, list_images  # noqa: PLC0415
    from harness.workloads.sources.folders import check_shard  # noqa: PLC0415

    root, hint = data_folder(options["data"]), how_to_point(options["data"])
    findings, classes = [], {}
    for split, expected in (
        ("train", options["train_examples"] or 1_281_167),
        ("val", _test_images(options)),
    ):
        check, folder, shard = f"{name}: {split}", root / split, root / f"{split}.tar"
        if shard.is_file() and (reason := check_shard(shard)):
            findings.append(fault(check, reason, f"remove it; {_PREPARE} --shards builds it again"))
            continue
        if not folder.is_dir() and shard.is_file():
            findings.append(ok(check, f"{shard} of {in_bytes(shard.stat().st_size)}, to be staged"))
            continue
        flat = folder.is_dir() and any(VALIDATION_IMAGE.fullmatch(path.name) for path in folder.iterdir())
        if flat:
            found = f"{folder} has images that are in no folder of a class"
            findings.append(fault(check, found, f"{_PREPARE} sorts them"))
            continue
        images = list_images(folder, options["classes"], hint)
        classes[split] = {Path(path).relative_to(folder).parts[0] for path in images.paths}
        if len(images.paths) < expected:
            found = f"{folder} must have {expected} images, got {len(images.paths)}"
            findings.append(fault(check, found, "complete them, or set workload.options.train_examples"))
            continue
        findings.append(read_sample(check, images.paths, SOURCE, most))
    if len(classes) == 2 and (odd := classes["train"] ^ classes["val"]):
        found = f"{min(odd)} is a class of only one of train and val, so classes have other numbers in each"
        findings.append(fault(f"{name}: classes", found, "make the folders of both the same"))
    return findings


def _test_images(options: Options) -> int:
    return options["test_examples"] or (50_000 if options["classes"] == 1000 else 1)


def _check_coco(name: str, options: Options, most: int | None) -> list[Finding]:
    from harness.workloads.coco.annotations import SOURCE, read_annotations  # noqa: PLC0415  loads numpy

    root, hint, findings = data_folder(options["data"]), how_to_point(options["data"]), []
    for split in (f"train{options['year']}", f"val{options['year']}"):
        check, folder = f"{name}: {split}", root / split
        annotations = read_annotations(root / f"annotations/instances_{split}.json", options["classes"], hint)
        paths = [str(folder / annotations.file_name(number)) for number in annotations.ids]
        shard = folder.with_name(f"{split}.tar")
        if not folder.is_dir() and shard.is_file():
            findings.append(ok(check, f"{shard} of {in_bytes(shard.stat().st_size)}, to be staged"))
            continue
        missing = [path for path in paths if not Path(path).is_file()]
        if missing:
            found = f"{len(missing)} of {len(paths)} images are missing, such as {missing[0]}"
            findings.append(fault(check, found, f"get them from {SOURCE}, {hint}"))
            continue
        findings.append(read_sample(check, paths, SOURCE, most))
    return findings


def _check_brain_mri(name: str, options: Options, most: int | None) -> list[Finding]:
    from harness.workloads.brain_mri import SOURCE  # noqa: PLC0415  others have the same name

    root, check = data_folder(options["data"]), f"{name}: slices"
    root = root / "kaggle_3m" if (root / "kaggle_3m").is_dir() else root
    masks = sorted(root.glob("*/*_mask.tif"))
    patients = {path.parent for path in masks}
    if len(patients) <= options["test_patients"]:
        found = (
            f"{root} must have more folders of patients than {options['test_patients']}, got {len(patients)}"
        )
        return [fault(check, found, f"get the files from {SOURCE}, {how_to_point(options['data'])}")]
    images = [path.with_name(path.name.replace("_mask.tif", ".tif")) for path in masks]
    if missing := [path for path in images if not path.is_file()]:
        return [fault(check, f"{missing[0]} is missing, and its mask is there", f"get it from {SOURCE}")]
    sample = read_sample(
        check, [str(path) for pair in zip(images, masks, strict=True) for path in pair], SOURCE, most
    )
    if sample.state == "ok" and (len(patients), len(masks)) != (110, 3929):
        found = f"{len(patients)} patients with {len(masks)} slices; published are 110 with 3,929"
        return [
            sample,
            warning(f"{name}: published", found, f"get the rest from {SOURCE} to compare with others"),
        ]
    return [sample]


def _check_text(name: str, options: Options, _: int | None) -> list[Finding]:
    from harness.workloads.language.corpus import find_text  # noqa: PLC0415  loads numpy

    findings = []
    for option in ("train_text", "test_text"):
        check = f"{name}: {option}"
        try:
            text = find_text(options, option)
            lines = sum(1 for _ in text.lines())
        except DataError as error:
            findings.append(fault(check, str(error), "correct that, and check again"))
            continue
        size = sum(path.stat().st_size for path in text.paths)
        findings.append(ok(check, f"{text.name}: {lines} lines, {in_bytes(size)}"))
    return findings


def _check_multi30k(name: str, options: Options, _: int | None) -> list[Finding]:
    import hashlib  # noqa: PLC0415

    from harness.workloads.translation.pairs import PUBLISHED, SOURCE, find_files, read_split  # noqa: PLC0415

    published = {one.name: one.checksum.removeprefix("sha256:") for one in PUBLISHED}
    findings = []
    for files in find_files({**options, "download": False}):
        check = f"{name}: {files.source.name.split('.')[0]}"
        pairs = len(read_split(files)[0])
        other = [
            path
            for path in files
            if path.name in published
            and hashlib.sha256(path.read_bytes()).hexdigest() != published[path.name]
        ]
        if other:
            found = f"{other[0]} has not the checksum of the published file"
            findings.append(warning(check, found, f"get it from {SOURCE} to compare with others"))
        else:
            findings.append(ok(check, f"{pairs} pairs"))
    return findings


_PREPARE = "kronscale data prepare imagenet"
_CHECKS: Mapping[str, Callable[[str, Options, int | None], list[Finding]]] = {
    "cifar10": _check_cifar,
    "cifar100": _check_cifar,
    "imagenet": _check_imagenet,
    "coco": _check_coco,
    "brain_mri": _check_brain_mri,
    "bert": _check_text,
    "gpt": _check_text,
    "multi30k": _check_multi30k,
}
