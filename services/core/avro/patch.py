"""The part of RFC 6902 (JSON Patch) that fixes are made of: add, replace, remove."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeAlias

from services.core.avro.json_document import Json

Operation: TypeAlias = dict[str, Json]
"""`{"op": "add", "path": …, "value": …}`, `replace` likewise, or `{"op": "remove", "path": …}`."""


class PatchError(ValueError):
    """A patch does not fit the document. The message has the operation and the path."""


def apply_patch(document: Json, patch: Sequence[Operation]) -> Json:
    """The changed document; the given one stays as it is. Raises PatchError for an unknown path, and for other operations."""
    changed: list[Json] = [copy.deepcopy(document)]
    for operation in patch:
        kind, path = operation.get("op"), operation.get("path")
        if kind not in ("add", "replace", "remove") or not isinstance(path, str):
            raise PatchError(f"not add, replace or remove with a path: {operation!r}")
        if path and not path.startswith("/"):
            raise PatchError(f"not a JSON pointer: {path!r}")
        parts = ["0", *(part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:])]
        parent = _walk(changed, parts[:-1], path)
        _change(parent, parts[-1], str(kind), copy.deepcopy(operation.get("value")), path)
    return changed[0]


def value_at(document: Json, path: str) -> Json:
    """The value at a JSON pointer. Raises PatchError when there is none."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
    return _walk(document, parts, path)


def _walk(value: Json, parts: list[str], path: str) -> Json:
    for part in parts:
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise PatchError(f"no value at {path!r}")
    return value


def _change(parent: Json, key: str, kind: str, value: Json, path: str) -> None:
    if isinstance(parent, dict):
        if kind != "add" and key not in parent:
            raise PatchError(f"no value at {path!r}")
        if kind == "remove":
            del parent[key]
        else:
            parent[key] = value
        return
    if not isinstance(parent, list):
        raise PatchError(f"no list or object around {path!r}")
    if kind == "add" and key == "-":
        parent.append(value)
        return
    index = int(key) if key.isdecimal() else -1
    if not 0 <= index < len(parent) + (kind == "add"):
        raise PatchError(f"no value at {path!r}")
    if kind == "add":
        parent.insert(index, value)
    elif kind == "replace":
        parent[index] = value
    else:
        del parent[index]
