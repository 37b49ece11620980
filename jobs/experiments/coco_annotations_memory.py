"""What a rank of the workload coco pays for COCO's annotations: memory and CPU seconds.

Makes a file of annotations as large as instances_train2017.json (118,287 images, 860,001 objects, polygons of
26 corners on average) and reads it in fresh processes: as this project does, and as pycocotools does, whole.
No photograph is needed.

    python jobs/experiments/coco_annotations_memory.py --folder /tmp/coco-size
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

IMAGES, OBJECTS, CATEGORIES = 118_287, 860_001, 80
MEAN_CORNERS = 26
SHOWN = 100  # images whose objects are then read


def write(path: Path) -> None:
    """A made-up file, entry by entry, in COCO's layout: annotations in no order of their images."""
    draws = random.Random(0)  # noqa: S311  not a secret
    with path.open("w") as file:
        file.write('{"info": {"year": 2017}, "licenses": [], "images": [')
        for image in range(IMAGES):
            entry = {
                "license": 3, "file_name": f"{image:012}.jpg", "coco_url": f"http://images/{image:012}.jpg",
                "height": 480, "width": 640, "date_captured": "2013-11-14 11:18:45", "id": image,
            }  # fmt: skip
            file.write((", " if image else "") + json.dumps(entry))
        file.write('], "annotations": [')
        for number in range(OBJECTS):
            file.write((", " if number else "") + json.dumps(_object(draws, number)))
        categories = [{"id": number, "name": str(number)} for number in range(1, CATEGORIES + 1)]
        file.write(f'], "categories": {json.dumps(categories)}}}')


def _object(draws: random.Random, number: int) -> dict[str, object]:
    corners = 4 + int(draws.expovariate(1 / (MEAN_CORNERS - 4)))
    polygon = [round(draws.uniform(0, 480), 2) for _ in range(2 * corners)]
    left, top, width, height = (round(draws.uniform(2, 200), 2) for _ in range(4))
    return {
        "segmentation": [polygon], "area": round(width * height, 4), "iscrowd": 0,
        "image_id": draws.randrange(IMAGES), "bbox": [left, top, width, height],
        "category_id": draws.randint(1, CATEGORIES), "id": number + 1,
    }  # fmt: skip


def measure(how: str, path: Path) -> None:
    """Print what reading took, in this process."""
    import pycocotools.coco as theirs  # noqa: PLC0415

    import harness.workloads.coco.annotations as ours  # noqa: PLC0415  loaded before memory is read

    before, began = _memory(), time.process_time()
    if how == "index":
        annotations = ours.read_annotations(path, CATEGORIES, "")
        seconds = time.process_time() - began
        began = time.process_time()
        for image in annotations.ids[:SHOWN]:
            annotations.objects(image)
    else:
        whole = theirs.COCO(path)
        seconds = time.process_time() - began
        began = time.process_time()
        for image in sorted(whole.imgs)[:SHOWN]:
            for entry in whole.imgToAnns[image]:
                whole.annToMask(entry)
    shown = (time.process_time() - began) / SHOWN
    after = _memory()
    held, before_mb, highest = (
        value / 1e6 for value in (after["RssAnon"] - before["RssAnon"], before["VmHWM"], after["VmHWM"])
    )
    print(
        f"{how}: holds {held:.0f} MB, highest {highest:.0f} MB (process {before_mb:.0f} MB before), read in "
        f"{seconds:.1f} CPU s, objects of an image in {shown * 1e3:.2f} ms",
        file=sys.stderr,
    )


def _memory() -> dict[str, int]:
    """Bytes, from the kernel."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmHWM")}


def main() -> None:
    """Make the file unless it is there, then measure each way in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--way", choices=("index", "pycocotools"))
    arguments = parser.parse_args()
    path = arguments.folder / "instances_train2017.json"
    if arguments.way:
        measure(arguments.way, path)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write(path)
    print(f"{path}: {path.stat().st_size / 1e6:.0f} MB", file=sys.stderr)
    for way in ("index", "pycocotools"):
        command = [sys.executable, __file__, "--folder", str(arguments.folder), "--way", way]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
