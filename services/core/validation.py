"""From pydantic's errors to problems that name file, line and key."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from services.core.yaml_source import BadConfiguration, Document, KeyPath

Model = TypeVar("Model", bound=BaseModel)


def validate_document(document: Document, model: type[Model]) -> Model:
    """The document as this model. Raises BadConfiguration with every problem at once, each at its line."""
    try:
        return model.model_validate({} if document.data is None else document.data)
    except ValidationError as error:
        problems = [
            document.problem(known_path(document.data, item["loc"]), describe(item["type"], item["msg"]))
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


def describe(kind: str, message: str) -> str:
    """Pydantic's message in an operator's words."""
    if kind == "extra_forbidden":
        return "unknown key"
    if kind == "missing":
        return "is required"
    return message.removeprefix("Value error, ")
