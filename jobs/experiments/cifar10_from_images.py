"""Packs CIFAR-10 from an archive of images into the binary batch files that the workload `cifar10` reads.

    python jobs/experiments/cifar10_from_images.py IMAGES.tar.xz OUT

The archive holds `<split>/<class>/<name>` with the splits `train` and `test`, as the part that the package
carries does (`harness/workloads/embedded/cifar10.tar.xz`). Images that were compressed as JPEGs are not the
published ones: say "CIFAR-10 (JPEG copy)" beside every result on them. The published Python batch files are
read as they are; a copy of them with other bytes is refused, because a pickle can run code.
"""

import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from harness.workloads.cifar.cifar_files import VARIANTS


def main(archive: Path, out: Path) -> None:
    """Write `OUT/cifar-10-batches-bin`: one byte of class and 3,072 of pixels for each image."""
    rows: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    classes: list[tuple[str, str]] = []
    with tarfile.open(archive) as images:
        for member in images:
            if member.isfile():
                split, class_name, _ = member.name.split("/")
                with Image.open(images.extractfile(member)) as image:
                    rows[split].append(np.asarray(image.convert("RGB")).transpose(2, 0, 1).reshape(-1))
                classes.append((split, class_name))
    names = sorted({name for _, name in classes})
    version = VARIANTS[10].binary
    folder = out / version.folder
    folder.mkdir(parents=True, exist_ok=True)
    for split, parts in (("train", version.train), ("test", (version.test,))):
        labels = np.array([names.index(name) for where, name in classes if where == split], np.uint8)
        table = np.column_stack([labels, np.stack(rows[split])])
        order = np.random.default_rng(0).permutation(len(table))  # every file has all classes
        for name, part in zip(parts, np.array_split(table[order], len(parts)), strict=True):
            (folder / name).write_bytes(part.tobytes())
    print(
        f"{folder}: {len(rows['train'])} training and {len(rows['test'])} test images, {len(names)} classes"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
