"""The observer's answers against its OpenAPI description."""

import re

import orjson
from jsonschema import Draft202012Validator

from services.observer.dead_letters import OPENAPI

DOCUMENT = orjson.loads(OPENAPI.read_bytes())


def check(name: str, body: object) -> None:
    """By the name of the schema."""
    schema = DOCUMENT["components"]["schemas"][name]
    Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(body)


def check_answer(method: str, path: str, status: int, body: object) -> None:
    """By what was asked; an answer that is not described fails."""
    bare = path.partition("?")[0]
    (template,) = [one for one in DOCUMENT["paths"] if re.fullmatch(re.sub(r"{\w+}", "[^/]+", one), bare)]
    answer = DOCUMENT["paths"][template][method.lower()]["responses"][str(status)]
    if "$ref" in answer:
        answer = DOCUMENT["components"]["responses"][answer["$ref"].rpartition("/")[2]]
    (media,) = answer["content"].values()
    Draft202012Validator({**media["schema"], "components": DOCUMENT["components"]}).validate(body)
