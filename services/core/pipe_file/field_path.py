"""Reads the payload field that a stream of the pipe file names for its id, key or time."""

from collections.abc import Callable, Sequence
from typing import Any

Column = list[Any]
Reader = Callable[[Sequence[dict[str, Any]]], Column]


def field_reader(path: str) -> Reader:
    """A function that returns the column of one payload field (nested names joined by dots) from parsed payloads."""
    first, *rest = path.split(".")
    if not rest:
        return lambda documents: [document.get(first) for document in documents]

    def read(documents: Sequence[dict[str, Any]]) -> Column:
        column: Column = [document.get(first) for document in documents]
        for name in rest:
            column = [value.get(name) if type(value) is dict else None for value in column]
        return column

    return read
