"""Reads site profiles, `jobs/sites/<name>.yaml`."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from harness.documents.validation_messages import did_you_mean, explain, not_allowed
from harness.documents.yaml_document import read_document
from harness.errors import SiteError
from harness.launchers.site import Site

DEFAULT_FOLDER = Path("jobs/sites")


def read_site(name: str, folder: Path = DEFAULT_FOLDER) -> Site:
    """Read a profile by name, or by path where `name` ends in `.yaml`.

    Raises:
        SiteError: there is no such profile, or it has a mistake; names the first one with its line.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.exists():
        known = sorted(found.stem for found in folder.glob("*.yaml"))
        there = f"{folder} has {', '.join(known)}" if known else f"{folder} has no profile"
        raise SiteError(f"{path}: no such site profile; {there}{did_you_mean(path.stem, known)}")
    document = read_document(path, SiteError)
    for key in document.content:
        if key not in Site.model_fields:
            raise document.error((key,), f" is not a key of a site{not_allowed(key, Site.model_fields)}")
    if document.content.get("name", path.stem) != path.stem:
        raise document.error(("name",), f"={document.content['name']!r} is not the file's name, {path.stem}")
    try:
        return _SITE.validate_json(json.dumps({"name": path.stem, **document.content}), strict=True)
    except ValidationError as error:
        place, sentence = explain(error)
        raise document.error(place, sentence) from None


_SITE = TypeAdapter(Site)
