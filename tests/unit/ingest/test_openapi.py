"""The published description against the code: clients and fuzzers believe it."""

from pathlib import Path

import orjson
import pytest
from jsonschema import Draft202012Validator

from services.ingest import problems
from services.ingest.app import OPENAPI
from services.ingest.body_formats import ENCODINGS, MEDIA_TYPES
from tests.support.raw_http import Reply
from tests.unit.ingest.service import Service

PAGE = Path(__file__).parents[3] / "docs" / "ingest.md"
DOCUMENT = orjson.loads(OPENAPI.read_bytes())
POST = DOCUMENT["paths"]["/v1/streams/{stream}/events"]["post"]
RESPONSES = {
    status: DOCUMENT["components"]["responses"][found["$ref"].rpartition("/")[2]] if "$ref" in found else found
    for status, found in POST["responses"].items()
}


def validate(reply: Reply) -> None:
    """Hold an answer against what the document says for its status and media type."""
    schema = RESPONSES[str(reply.status)]["content"][reply.headers["content-type"]]["schema"]
    Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(reply.json())


def test_it_names_every_problem_media_type_and_encoding() -> None:
    """A problem that the document lacks is one that no client handles."""
    assert set(DOCUMENT["components"]["schemas"]["ProblemType"]["enum"]) == {kind.uri for kind in problems.ALL}
    assert {str(kind.status) for kind in problems.ALL} <= set(RESPONSES)
    assert set(POST["requestBody"]["content"]) == set(MEDIA_TYPES)
    encodings = next(one for one in POST["parameters"] if one["name"] == "Content-Encoding")["schema"]["enum"]
    assert set(encodings) == ENCODINGS - {"x-gzip"} | {"identity"}


def test_its_schemas_are_schemas_and_its_examples_fit() -> None:
    """JSON Schema 2020-12, which OpenAPI 3.1 is made of."""
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    titles = {kind.uri: kind.title for kind in problems.ALL}
    for response in RESPONSES.values():
        for content in response["content"].values():
            validator = Draft202012Validator({**content["schema"], "components": DOCUMENT["components"]})
            for example in content.get("examples", {}).values():
                validator.validate(example["value"])
                if "title" in example["value"]:
                    assert example["value"]["title"] == titles[example["value"]["type"]]


@pytest.mark.parametrize(
    ("body", "media", "status"),
    [
        (b"[{}]", "application/json", 200),
        (b"[{},1]", "application/json", 207),
        (b"[1]", "application/json", 422),
        (b"", "application/json", 400),
        (b"{}", "text/plain", 415),
        (b"x" * 60_000, "application/json", 413),
    ],
)
async def test_answers_are_as_described(service: Service, body: bytes, media: str, status: int) -> None:
    """A generated client must be able to parse what we send."""
    reply = await service.post(body, media=media)
    assert reply.status == status
    validate(reply)


def test_the_page_names_every_problem() -> None:
    """docs/ingest.md is where a person looks a problem up, under the status that it comes with."""
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for kind in problems.ALL:
        assert any(str(kind.status) in row[1] and f"`{kind.name}`" in row[2] for row in rows), kind.name
