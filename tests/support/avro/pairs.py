"""Pairs of schemas by the thousand: an old one, and a new one that was made from it by a few edits. A seed is a pair."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

Json = Any

_PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
_LOGICAL = (
    {"type": "int", "logicalType": "date"},
    {"type": "int", "logicalType": "time-millis"},
    {"type": "long", "logicalType": "time-micros"},
    {"type": "long", "logicalType": "timestamp-millis"},
    {"type": "long", "logicalType": "timestamp-micros"},
    {"type": "string", "logicalType": "uuid"},
    {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
    {"type": "bytes", "logicalType": "decimal", "precision": 7, "scale": 2},
    {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 3},
)
_DEFAULTS = {
    "null": None,
    "boolean": True,
    "int": 7,
    "long": 8,
    "float": 1.5,
    "double": 2.5,
    "bytes": "b",
    "string": "s",
}
_SYMBOLS = ("A", "B", "C", "D", "E", "F")


def pair(seed: int) -> tuple[Json, Json]:
    """(old, new)."""
    rng = random.Random(seed)
    spaces = rng.choice((("",), ("a.", "a.b.")))
    old = _Maker(rng, spaces).type(0, top=True)
    if rng.random() < 0.02:
        return old, _Maker(rng, spaces).type(0, top=True)
    new = copy.deepcopy(old)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 5))):
        changed = _edit(rng, spaces, new)
        if changed is not None:
            new = changed
    return old, new


class _Maker:
    """Makes types. Names are full ones, and count up from `first`, so that few are there twice."""

    def __init__(self, rng: random.Random, spaces: tuple[str, ...], first: int = 0) -> None:
        self.rng = rng
        self.spaces = spaces
        self.count = first
        self.open: list[str] = []
        self.known: list[str] = []

    def name(self) -> str:
        self.count += 1
        return f"{self.rng.choice(self.spaces)}T{self.count}"

    def type(self, depth: int, *, top: bool = False, union: bool = True) -> Json:
        rng = self.rng
        choices: list[Callable[[], Json]] = [
            lambda: rng.choice(_PRIMITIVES),
            lambda: copy.deepcopy(rng.choice(_LOGICAL)),
        ]
        if depth < 4:
            choices += [lambda: self.record(depth)] * (3 if not top else 12)
            choices += [self.enum, self.fixed]
            choices += [lambda: {"type": "array", "items": self.type(depth + 1)}]
            choices += [lambda: {"type": "map", "values": self.type(depth + 1)}]
            if union:
                choices += [lambda: self.union(depth)] * 3
        if self.known or self.open:
            choices += [lambda: rng.choice(self.known + self.open)]
        return rng.choice(choices)()

    def record(self, depth: int) -> Json:
        name = self.name()
        self.open.append(name)
        fields = [self.field(f"f{index}", depth) for index in range(self.rng.randint(0, 4))]
        self.open.remove(name)
        self.known.append(name)
        return {"type": "record", "name": name, "fields": fields}

    def field(self, name: str, depth: int) -> Json:
        made: Json = {"name": name, "type": self.type(depth + 1)}
        default = default_of(made["type"])
        if default is not _NONE and self.rng.random() < 0.5:
            made["default"] = default
        return made

    def enum(self) -> Json:
        name = self.name()
        self.known.append(name)
        symbols = self.rng.sample(_SYMBOLS, self.rng.randint(1, 4))
        made: Json = {"type": "enum", "name": name, "symbols": symbols}
        if self.rng.random() < 0.3:
            made["default"] = self.rng.choice(symbols)
        return made

    def fixed(self) -> Json:
        name = self.name()
        self.known.append(name)
        size = self.rng.choice((0, 1, 4, 16))
        made: Json = {"type": "fixed", "name": name, "size": size}
        if size == 16:
            made |= self.rng.choice(({}, {"logicalType": "decimal", "precision": self.rng.choice((9, 20)), "scale": 2}))
        return made

    def union(self, depth: int) -> Json:
        branches: list[Json] = ["null"] if self.rng.random() < 0.7 else []
        for _ in range(self.rng.randint(1, 3)):
            branch = self.type(depth + 1, union=False)
            if all(_label(branch) != _label(other) for other in branches):
                branches.append(branch)
        if self.rng.random() < 0.3:
            branches = branches[1:] + branches[:1]
        return branches


_NONE = object()


def default_of(kind: Json) -> Json:
    """A default for a type, or _NONE."""
    if isinstance(kind, list):
        return default_of(kind[0]) if kind else _NONE
    if isinstance(kind, str):
        return _DEFAULTS.get(kind, _NONE)
    match kind["type"]:
        case "array":
            return []
        case "map":
            return {}
        case "enum":
            return kind["symbols"][0]
        case "fixed":
            return "\u00ff" * kind["size"]
        case "record":
            values = {field["name"]: default_of(field["type"]) for field in kind["fields"] if "default" not in field}
            return _NONE if _NONE in values.values() else values
        case primitive:
            return _DEFAULTS[primitive]


def _label(kind: Json) -> str:
    """What may be only once in a union."""
    if isinstance(kind, str):
        return kind
    return str(kind["name"] if "name" in kind else kind["type"])


def nodes(value: Json, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Json]]:
    """All types of a schema with their paths."""
    found: list[tuple[tuple[Any, ...], Json]] = [(path, value)]
    if isinstance(value, list):
        for index, item in enumerate(value):
            found += nodes(item, (*path, index))
    elif isinstance(value, dict):
        for key in ("items", "values"):
            if key in value:
                found += nodes(value[key], (*path, key))
        for index, field in enumerate(value.get("fields", [])):
            found += nodes(field["type"], (*path, "fields", index, "type"))
    return found


def _put(root: Json, path: tuple[Any, ...], value: Json) -> Json:
    if not path:
        return value
    holder = root
    for part in path[:-1]:
        holder = holder[part]
    holder[path[-1]] = value
    return root


def _edit(rng: random.Random, spaces: tuple[str, ...], root: Json) -> Json:
    """One edit in place. The root, or None when nothing was done."""
    path, node = rng.choice(nodes(root))
    maker = _Maker(rng, spaces, rng.randrange(50, 10_000, 50))
    if isinstance(node, list):
        return _edit_union(maker, root, path, node)
    if isinstance(node, dict):
        match node["type"]:
            case "record":
                return _edit_record(maker, root, node)
            case "enum":
                return _edit_enum(rng, root, node)
            case "fixed" if rng.random() < 0.7:
                node["size"] = rng.choice((4, 8, 16))
                return root
    return _replace(maker, root, path, node)


def _replace(maker: _Maker, root: Json, path: tuple[Any, ...], node: Json) -> Json:
    rng = maker.rng
    inside = bool(path) and isinstance(path[-1], int)
    wider = {"int": ("long", "float", "double"), "long": ("float", "double", "int"), "float": ("double", "long")}
    wider |= {"double": ("float",), "bytes": ("string",), "string": ("bytes",)}
    if isinstance(node, str) and node in wider and rng.random() < 0.5:
        return _put(root, path, rng.choice(wider[node]))
    if not inside and rng.random() < 0.5:
        return _put(root, path, ["null", node] if node != "null" else ["null", "int"])
    return _put(root, path, maker.type(3, union=not inside))


def _edit_union(maker: _Maker, root: Json, path: tuple[Any, ...], node: list[Json]) -> Json:
    rng = maker.rng
    action = rng.randrange(4)
    if action == 0 and node:
        del node[rng.randrange(len(node))]
    elif action == 1:
        node.append(maker.type(3, union=False))
    elif action == 2 and node:
        return _put(root, path, rng.choice(node))
    else:
        rng.shuffle(node)
    return root


def _edit_enum(rng: random.Random, root: Json, node: Json) -> Json:
    action = rng.randrange(5)
    if action == 0:
        node["symbols"] = rng.sample(_SYMBOLS, rng.randint(1, 4))
    elif action == 1:
        node["default"] = rng.choice(node["symbols"])
    elif action == 2:
        node.pop("default", None)
    elif action == 3:
        node["symbols"] = node["symbols"][:-1] or ["A"]
    else:
        _rename(rng, node)
    return root


def _rename(rng: random.Random, node: Json) -> None:
    """The uses of the type keep the old name, so only unused ones can be renamed; others make a text that is refused."""
    before = node["name"]
    if rng.random() < 0.3:
        node["name"] = f"c.{before.rpartition('.')[2]}"
    else:
        node["name"] = before + "X"
    if rng.random() < 0.5:
        node["aliases"] = [before, "Other"]


def _edit_record(maker: _Maker, root: Json, node: Json) -> Json:
    rng = maker.rng
    fields = node["fields"]
    action = rng.randrange(8)
    field = rng.choice(fields) if fields else None
    if action == 0:
        fields.insert(rng.randint(0, len(fields)), maker.field(f"g{rng.randint(0, 3)}", 3))
    elif action == 1 and field is not None:
        fields.remove(field)
    elif action == 2 and field is not None:
        default = default_of(field["type"])
        if default is not _NONE:
            field["default"] = default
    elif action == 3 and field is not None:
        field.pop("default", None)
    elif action == 4 and field is not None:
        field["aliases"] = [field["name"]]
        field["name"] = f"h{rng.randint(0, 3)}"
    elif action == 5 and field is not None:
        field["aliases"] = [f"f{rng.randint(0, 4)}"]
    elif action == 6:
        rng.shuffle(fields)
    else:
        _rename(rng, node)
    return root
