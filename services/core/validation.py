"""From pydantic's errors to problems that name file, line and key."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from services.core.yaml_source import BadConfiguration, Document, KeyPath

Model = TypeVar("Model", bound=BaseModel)

_KEYS, _WHOLE, _BOOLEAN = "keys and values are needed", "a whole number is needed", "true or false is needed"
_WORDS = {
    "extra_forbidden": "unknown key",
    "missing": "is required",
    "model_type": _KEYS,
    "dict_type": _KEYS,
    "list_type": "a list is needed",
    "string_type": "a text is needed",
    "path_type": "a path is needed",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "bool_type": _BOOLEAN,
    "bool_parsing": _BOOLEAN,
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}
"""By pydantic's type of error; others keep pydantic's message."""


def validate_document(document: Document, model: type[Model]) -> Model:
    """The document as this model. Raises BadConfiguration with every problem at once, each at its line."""
    try:
        return model.model_validate({} if document.data is None else document.data)
    except ValidationError as error:
        problems = [
            document.problem(known_path(document.data, item["loc"]), describe(item))
            for item in error.errors(include_url=False, include_input=False)
        ]
        raise BadConfiguration(problems) from None


def known_path(data: object, loc: Sequence[int | str]) -> KeyPath:
    """The part of a pydantic location that exists in the data (pydantic adds names of union branches)."""
    path: list[str | int] = []
    for index, part in enumerate(loc):
        if isinstance(data, Mapping) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif index < len(loc) - 1 or part == "[key]":  # pydantic's word for "the key itself"
            continue
        path.append(part)
    return tuple(path)


def describe(error: ErrorDetails) -> str:
    """A pydantic error in an operator's words; never the value, which may be a secret."""
    words = _WORDS.get(error["type"])
    return words.format(**error.get("ctx", {})) if words else error["msg"].removeprefix("Value error, ")
