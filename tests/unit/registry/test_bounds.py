"""Schemas that are large, many or deep in references: bounded time and memory, and a refusal that says which bound."""

import json
from itertools import chain
from typing import Any
from unittest.mock import AsyncMock

import pytest

from services.core.avro.repair import Comparison, compare
from services.registry import schema_reader
from services.registry.catalog import Schema
from services.registry.registrar import Registrar
from services.registry.schema_reader import SchemaReader
from tests.faults.registry_child import make_schema
from tests.unit.registry.service import running_registry


async def test_a_protocol_that_grows_when_it_is_written_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: 1 MB in which 2,000 records use one of 10,000 fields becomes gigabytes, and the registry dies."""
    monkeypatch.setattr(schema_reader, "MAX_PROTOCOL_BYTES", 50_000)
    wide = "record Wide { " + " ".join(f"int field_{n};" for n in range(100)) + " }"
    users = " ".join(f"record User{n} {{ Wide wide; }}" for n in range(50))
    async with running_registry() as client:
        body = {"text": f"protocol P {{ {wide} {users} }}", "language": "avdl"}
        refused = await client.ask("POST", "/v1/protocols", body, status=422)
        assert "written out" in refused["detail"]
        assert await client.ask("GET", "/subjects") == []
        await client.ask("POST", "/v1/protocols", {**body, "text": f"protocol P {{ {wide} }}"}, status=201)


async def test_parsed_schemas_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: each schema that was compared once stays in memory, at thirty times its size."""
    monkeypatch.setattr(schema_reader, "MAX_KEPT_BYTES", 1000)
    async with running_registry() as client:
        for number in range(30):
            await client.register(f"s{number}", make_schema("a", number))
        catalog = client.registrar.catalog
        reader = SchemaReader(catalog)
        for _ in range(2):
            for schema in catalog.by_id.values():
                assert reader.parsed(schema).fingerprint == schema.stored.fingerprint
                assert sum(len(catalog.by_id[kept].stored.schema) for kept in reader._kept) == reader._bytes <= 1000
        assert len(reader._kept) > 2


async def test_a_level_reads_only_the_versions_that_it_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the thousandth version of a subject takes a thousand times as long as the first."""
    monkeypatch.setattr(schema_reader, "MAX_KEPT_BYTES", 1)
    looked: list[int] = []
    original = SchemaReader.parsed

    def parsed(self: SchemaReader, schema: Schema) -> object:
        looked.append(schema.id)
        return original(self, schema)

    monkeypatch.setattr(SchemaReader, "parsed", parsed)
    async with running_registry() as client:
        for number in range(5):
            await client.register("s", make_schema("a", number))
        assert looked == [1, 2, 3, 4]
        await client.ask("PUT", "/config/s", {"compatibility": "FULL_TRANSITIVE"})
        looked.clear()
        await client.register("s", make_schema("a", 5))
        assert looked == [1, 2, 3, 4, 5]


async def test_a_schema_of_a_megabyte() -> None:
    """Broken: a large documentation is refused, or a larger one is a fault of the server."""
    async with running_registry() as client:
        for length, status in ((1_000_000, 200), (1 << 20, 422)):
            text = json.dumps({"type": "fixed", "name": "F", "size": 1, "doc": "x" * length})
            found = await client.register("s", text, status=status)
        assert "1,048,576 bytes" in found["message"]


@pytest.mark.parametrize("odd", [10**30, json.loads("[" * 249 + "]" * 249)], ids=["integer", "depth"])
async def test_values_that_few_read_come_back_as_they_are(odd: object) -> None:
    """Broken: an attribute that nobody else looks at makes every refusal about its schema a fault of the server."""
    kept = {"type": "record", "name": "R", "fields": [{"name": "a", "type": {"type": "bytes", "x": odd}}]}
    empty = json.dumps({"type": "record", "name": "R", "fields": []})
    async with running_registry() as client:
        await client.ask("PUT", "/config/s", {"compatibility": "FORWARD"})
        await client.register("s", json.dumps(kept))
        refused = await client.register("s", empty, status=409)
        assert refused["differences"][0]["version"] == 1
        verbose = await client.ask("POST", "/compatibility/subjects/s/versions/latest?verbose=true", {"schema": empty})
        assert not verbose["is_compatible"]
        path = "/subjects/other/versions?normalize=true"
        await client.ask("POST", path, {"schema": json.dumps(kept)})
        protocol = {"protocol": "P", "types": [kept], "messages": {}}
        await client.ask("POST", "/v1/protocols", {"text": json.dumps(protocol)}, status=201)


async def test_what_is_refused_is_quoted_as_it_can_be() -> None:
    """Broken: half of a surrogate pair, or an exponent without end, makes the refusal itself a fault of the server."""
    async with running_registry() as client:
        twice = '{"\\ud800": 1, "\\ud800": 2}'
        await client.register("s", twice, status=422)
        await client.ask("POST", "/v1/schemas", {"schema": twice}, status=422)
        for text, status in (('record R { int d = "\\ud800"; }', 422), ("record R { double d = -0x1p99999; }", 201)):
            await client.ask(
                "POST", "/v1/protocols", {"text": f"protocol P {{ {text} }}", "language": "avdl"}, status=status
            )


async def test_a_schema_that_is_too_deep_without_its_references_is_not_stored() -> None:
    """Broken: `normalize` stores a text that the registry itself cannot read, and the subject is lost."""
    async with running_registry() as client:
        kind: object = "int"
        references: list[dict[str, object]] = []
        for level in range(6):  # each text is within the limits
            for inner in range(15):
                name = f"L{level}_{inner}"
                kind = {"type": "record", "name": name, "fields": [{"name": "f", "type": kind}]}
            body = {"schema": json.dumps(kind), "references": references}
            await client.ask("POST", f"/subjects/s{level}/versions", body)
            references = [{"name": name, "subject": f"s{level}", "version": 1}]
            kind = name
        body = {"schema": json.dumps({"type": "array", "items": kind}), "references": references}
        refused = await client.ask("POST", "/subjects/s/versions?normalize=true", body, status=422)
        assert "deeper" in refused["message"]
        await client.ask("POST", "/subjects/s/versions", body)
        await client.ask("POST", "/v1/check", {"subject": "s", "schema": '"int"'})


async def test_the_reasons_of_a_refusal_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: one client's refusal is explained for seconds, while every other registration waits."""
    asked: list[bool] = []
    async with running_registry() as client:

        def counted(*args: Any) -> Comparison:
            asked.append(client.registrar.log.writing.locked())
            return compare(*args)

        monkeypatch.setattr("services.registry.registrar.compare", counted)
        await client.register("s", make_schema("a", 0))
        broken = json.dumps({"type": "fixed", "name": "F", "size": 1})
        await client.register("s", broken, status=409)
        assert asked == [False]


async def test_a_refusal_whose_reason_is_gone_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: somebody deprecates a version between the decision and its explanation, and a producer is refused for no reason."""
    async with running_registry() as client:
        monkeypatch.setattr(Registrar, "_fits", AsyncMock(return_value=False))
        refused = await client.register("s", make_schema("a", 0), status=503)
        assert "changed" in refused["message"]
        protocol = {"text": "protocol P { record R { int a; } }", "language": "avdl"}
        refused = await client.ask("POST", "/v1/protocols", protocol, status=503)
        assert "changed" in refused["detail"]
        assert await client.ask("GET", "/subjects") == []
        monkeypatch.undo()
        await client.register("s", make_schema("a", 0))
        await client.ask("POST", "/v1/protocols", protocol, status=201)


async def test_work_on_schemas_has_a_line_of_a_bounded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: clients that send large schemas all at once take all memory."""
    monkeypatch.setattr(schema_reader, "MAX_COMPUTING", 0)
    async with running_registry() as client:
        refused = await client.register("s", make_schema("a", 0), status=503)
        assert refused["type"] == "urn:penstock:problem:busy"
        monkeypatch.undo()
        await client.register("s", make_schema("a", 0))


async def test_many_subjects_are_listed_in_pages() -> None:
    """Broken: a page of another size skips a subject, or gives one twice."""
    async with running_registry() as client:
        for number in range(7):
            await client.register(f"s{number}", make_schema("a", 0))
        pages = [await client.ask("GET", f"/subjects?offset={offset}&limit=3") for offset in (0, 3, 6, 9)]
        assert [len(page) for page in pages] == [3, 3, 1, 0]
        assert [*chain(*pages)] == await client.ask("GET", "/subjects")
        await client.ask("GET", "/subjects?limit=many", status=400)
