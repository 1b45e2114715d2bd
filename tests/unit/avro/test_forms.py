"""Canonical forms and fingerprints: the published vectors, and what changes an identity."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.avro.forms import crc64, number
from services.core.avro.idl import parse_idl
from services.core.avro.json_document import SchemaError
from services.core.avro.parsing import parse_schema
from tests.support.avro import corpus_files
from tests.support.avro.pairs import pair

VECTORS = json.loads(Path("schema/avro-fingerprints.json").read_text(encoding="utf-8"))["vectors"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_published_vectors(vector: dict[str, Any]) -> None:
    """Broken: a fingerprint of an earlier version names nothing any more. Never change a vector: ids are for ever."""
    schema = parse_schema(json.dumps(vector["schema"]))
    found = {
        "resolution_form": schema.resolution_form,
        "fingerprint": schema.fingerprint,
        "parsing_form": schema.parsing_form,
        "crc64": f"{schema.crc64:016x}",
        "parsing_sha256": schema.parsing_sha256,
    }
    assert found == {key: vector[key] for key in found}


def test_crc64_of_avros_specification() -> None:
    """Broken: Avro's fingerprints are not found."""
    assert crc64(b'"null"') == 7195948357588979594
    assert crc64(b"") == 0xC15D213AA4D7A795


@given(st.integers(0, 1 << 32))
def test_the_resolution_form_is_a_schema_with_its_own_form(seed: int) -> None:
    """Broken: the form loses something, so that two schemas have one identity."""
    try:
        schema = parse_schema(json.dumps(pair(seed)[1]))
    except SchemaError:
        return
    again = parse_schema(schema.resolution_form)
    assert again.resolution_form == schema.resolution_form
    assert again.parsing_form == schema.parsing_form
    assert parse_schema(json.dumps(schema.to_json(), indent=2)).fingerprint == schema.fingerprint


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_read_back(value: float) -> None:
    """Broken: a default becomes another number."""
    assert float(number(value)) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1"),
        (-1.5, "-1.5"),
        (1e21, "1e+21"),
        (1e20, "100000000000000000000"),
        (1e-6, "0.000001"),
        (1.5e-7, "1.5e-7"),
        (5e-324, "5e-324"),
        (1.7976931348623157e308, "1.7976931348623157e+308"),
        (123456789012345680000.0, "123456789012345680000"),
        (float("nan"), '"NaN"'),
        (float("-inf"), '"-Infinity"'),
    ],
)
def test_numbers_as_rfc_8785_writes_them(value: float, text: str) -> None:
    """Broken: another implementation of the form has another fingerprint."""
    assert number(value) == text


@pytest.mark.parametrize(
    "path", [path for path in corpus_files.texts(".avdl") if path.parent.name == "input"], ids=lambda path: path.stem
)
def test_idl_gives_what_avros_tests_expect(path: Path) -> None:
    """Broken: the same file means one thing to a producer's build and another one to the registry."""
    stem = path.stem.removesuffix("_schema")
    output = next(file for file in corpus_files.FOLDER.glob(f"output/{stem}.*"))
    expected = json.loads(output.read_text(encoding="utf-8"))
    found = parse_idl(path.read_bytes(), load=corpus_files.load, file=f"input/{path.name}")
    if path.stem == "status_schema":
        assert found.schema is None
        expected = [expected] if isinstance(expected, dict) else expected
    assert found.to_json() == expected
