"""What clients of Confluent's registry send beside the plain paths: names, parameters and members that differ from ours."""

import asyncio
from urllib.parse import quote

import pytest

from services.core import metrics
from services.registry import registrar
from tests.support.memory_objects import MemoryObjects
from tests.unit.registry.service import running_registry

V1 = '{"type": "record", "name": "com.acme.Click", "fields": [{"name": "id", "type": "long"}]}'


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a/b", "letters"),
        ("a%2Fb", "letters"),
        ("..%2f..", "letters"),
        ("клик", "letters"),
        ("x" * 300, "1 to 255"),
        (":.other:clicks-value", "default context"),
        (":*:clicks-value", "default context"),
    ],
)
async def test_names_that_are_refused(name: str, says: str) -> None:
    """Broken: a name of another registry ends in a 500, or in a subject that nobody finds again."""
    async with running_registry() as client:
        for method, path in (("POST", "versions"), ("GET", "versions"), ("GET", "versions/latest")):
            body = {"schema": V1} if method == "POST" else None
            refused = await client.ask(method, f"/subjects/{quote(name, safe='')}/{path}", body, status=400)
            assert says in refused["message"]
        assert await client.ask("GET", "/subjects") == []


@pytest.mark.parametrize("kind", ["JSON", "PROTOBUF", "AVRO2", 7, {"a": 1}])
async def test_other_kinds_of_schemas_are_refused_by_name(kind: object) -> None:
    """Broken: the author of a Protobuf schema reads a mistake of Avro's syntax."""
    async with running_registry() as client:
        body = {"schema": "syntax = 'proto3';", "schemaType": kind}
        refused = await client.ask("POST", "/subjects/s/versions", body, status=422)
        assert refused["error_code"] == 42201
        assert "AVRO" in refused["message"]
        assert (str(kind) in refused["message"]) == (kind in ("JSON", "PROTOBUF"))


async def test_parameters() -> None:
    """Broken: a client that lists deleted subjects takes living ones for deleted, or a parameter changes a version."""
    async with running_registry() as client:
        first = await client.register("s", V1)
        spaced = V1.replace(", ", " ,  ")
        normalized = await client.ask("POST", "/subjects/s/versions?normalize=true", {"schema": spaced})
        assert (normalized["id"], normalized["version"]) == (first["id"], 1)
        assert (await client.ask("POST", "/subjects/s?normalize=true&deleted=true", {"schema": spaced}))["version"] == 1
        assert await client.ask("GET", "/subjects?deleted=true&subjectPrefix=:*:") == ["s"]
        assert await client.ask("GET", "/subjects?deletedOnly=true") == []
        assert await client.ask("GET", "/subjects/s/versions?deleted=true") == [1]
        assert await client.ask("GET", "/subjects/s/versions?deletedOnly=true") == []
        assert (await client.ask("GET", "/config/s?defaultToGlobal=true"))["compatibilityLevel"] == "BACKWARD"
        assert (await client.ask("GET", "/mode/s?defaultToGlobal=true"))["mode"] == "READWRITE"
        assert (await client.ask("GET", "/config/s", status=404))["error_code"] == 40408
        assert (await client.ask("GET", "/subjects/:.:s/versions/latest"))["subject"] == "s"


@pytest.mark.parametrize("body", [{"id": "7"}, {"version": [1]}, {"id": 7}, {"id": 1.5}])
async def test_ids_of_a_client_are_refused(body: dict[str, object]) -> None:
    """Broken: a copied registry ends in a 500, or believes that its ids were kept."""
    async with running_registry() as client:
        refused = await client.ask("POST", "/subjects/s/versions", {"schema": V1, **body}, status=422)
        assert refused["error_code"] == 42205
        assert (await client.ask("POST", "/subjects/s/versions", {"schema": V1, "id": -1, "version": 0}))["id"] == 1


async def test_one_schema_under_two_subjects_at_once() -> None:
    """Broken: a schema that is registered under two subjects at the same moment gets two ids."""
    objects = MemoryObjects()
    async with running_registry(objects) as one, running_registry(objects) as two:
        found = await asyncio.gather(*(client.register(f"s{n}", V1) for n in range(6) for client in (one, two)))
        assert {(each["id"], each["version"]) for each in found} == {(1, 1)}
        assert len(await two.ask("GET", "/schemas/ids/1/versions")) == 6


async def test_a_store_without_an_answer_makes_nobody_wait_in_line_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: while the store hangs, each registration waits for all before it, and memory grows with them."""
    monkeypatch.setattr(registrar, "WITHIN_S", 0.05)
    monkeypatch.setattr(registrar, "MAX_WAITING", 2)
    async with running_registry() as client, client.registrar.log.writing:
        before = metrics.REGISTRY_REFUSED.labels("busy")._value.get()
        bodies = [client.ask("POST", "/v1/schemas", {"schema": V1, "subject": f"s{n}"}, status=503) for n in range(3)]
        said = {(await each)["type"] for each in asyncio.as_completed(bodies)}
        assert said == {"urn:penstock:problem:busy"}
        assert metrics.REGISTRY_REFUSED.labels("busy")._value.get() == before + 3
