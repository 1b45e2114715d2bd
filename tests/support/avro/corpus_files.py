"""Avro's own IDL files (corpus/README.md), and how an import in them is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.core.avro.idl import parse_idl
from services.core.avro.json_document import SchemaError

FOLDER = Path(__file__).with_name("corpus")
_SECOND = FOLDER / "putOnClassPath"


def texts(suffix: str) -> list[Path]:
    """All files of the corpus with a suffix."""
    return sorted(FOLDER.rglob(f"*{suffix}"))


def load(path: str) -> bytes:
    """An import: beside the importing file, otherwise in the second place."""
    parts = Path(path).parts
    places = [FOLDER / path, *(_SECOND.joinpath(*parts[index:]) for index in range(len(parts)))]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise FileNotFoundError(path)
    return found.read_bytes()


def read(path: Path) -> Any:
    """The JSON of an IDL file, or the mistake in it."""
    try:
        return parse_idl(path.read_bytes(), load=load, file=str(path.relative_to(FOLDER))).to_json()
    except SchemaError as error:
        return error


def ordered(value: Any) -> str:
    """A JSON value as text, with the order of its keys."""
    return json.dumps(value)
