"""The registry's APIs: what clients of Confluent's registry expect, and our own paths."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import pytest

from services.core.avro.patch import apply_patch
from services.core.security.keys import make_key
from services.registry.entries import entry_name
from services.registry.schema_reader import MAX_REFERENCE_LEVELS
from tests.support.memory_objects import MemoryObjects
from tests.unit.registry.service import running_registry


def record(*fields: Mapping[str, object], name: str = "com.acme.Click") -> str:
    return json.dumps({"type": "record", "name": name, "fields": list(fields)})


ID = {"name": "id", "type": "long"}
PAGE = {"name": "page", "type": "string"}
V1, V2 = record(ID), record(ID, {**PAGE, "default": ""})
INCOMPATIBLE = record(ID, PAGE)


async def test_a_refusal_names_the_field_the_rule_and_the_fix() -> None:
    """Broken: a producer sees "incompatible", and nobody knows which field or what to do."""
    async with running_registry() as client:
        await client.register("clicks-value", V1)
        refused = await client.register("clicks-value", INCOMPATIBLE, status=409)
        assert refused["error_code"] == 409
        (found,) = refused["differences"]
        assert found["path"] == "/fields/1"
        assert found["rule"] in refused["message"]
        assert "page" in refused["message"]
        assert found["fix"]
        assert found["version"] == 1
        own = await client.ask("POST", "/v1/schemas", {"subject": "clicks-value", "schema": INCOMPATIBLE}, status=409)
        assert own["type"] == "urn:penstock:problem:incompatible"
        assert own["differences"] == refused["differences"]


async def test_one_id_means_one_schema() -> None:
    """Broken: the same schema gets a second id, or two schemas share one."""
    async with running_registry() as client:
        first = await client.register("clicks-value", V1)
        spaced = json.dumps(json.loads(V1), indent=4)
        assert (await client.register("clicks-value", spaced))["id"] == first["id"]
        assert (await client.register("orders-value", V1))["id"] == first["id"]
        second = await client.register("clicks-value", V2)
        assert second["id"] == first["id"] + 1
        assert second["version"] == 2
        uses = await client.ask("GET", f"/schemas/ids/{first['id']}/versions")
        assert uses == [{"subject": "clicks-value", "version": 1}, {"subject": "orders-value", "version": 1}]
        by_guid = await client.ask("GET", f"/schemas/guids/{first['guid']}")
        assert (by_guid["id"], by_guid["schema"]) == (first["id"], V1)


async def test_versions_lookups_and_their_errors() -> None:
    """Broken: a client of Confluent's registry reads another code than it knows, and treats it as a fault of the server."""
    async with running_registry() as client:
        await client.register("clicks-value", V1)
        await client.register("clicks-value", V2)
        assert await client.ask("GET", "/subjects") == ["clicks-value"]
        assert await client.ask("GET", "/subjects/clicks-value/versions") == [1, 2]
        assert (await client.ask("GET", "/subjects/clicks-value/versions/latest"))["version"] == 2
        assert (await client.ask("GET", "/subjects/:.:clicks-value/versions/-1"))["version"] == 2
        assert await client.ask("GET", "/subjects/clicks-value/versions/1/schema") == json.loads(V1)
        assert (await client.ask("POST", "/subjects/clicks-value", {"schema": V1}))["version"] == 1
        assert await client.ask("GET", "/schemas/types") == ["AVRO"]
        errors = [
            ("GET", "/subjects/none/versions", None, 404, 40401),
            ("GET", "/subjects/clicks-value/versions/3", None, 404, 40402),
            ("GET", "/schemas/ids/99", None, 404, 40403),
            ("GET", "/schemas/guids/none", None, 404, 40403),
            ("POST", "/subjects/clicks-value", {"schema": '"string"'}, 404, 40403),
            ("GET", "/config/clicks-value", None, 404, 40408),
            ("POST", "/subjects/a/versions", {"schema": '{"type": "record"}'}, 422, 42201),
            ("POST", "/subjects/a/versions", {"schema": "x", "schemaType": "PROTOBUF"}, 422, 42201),
            ("GET", "/subjects/clicks-value/versions/0", None, 422, 42202),
            ("PUT", "/config", {"compatibility": "SOMETIMES"}, 422, 42203),
            ("PUT", "/mode/a", {"mode": "IMPORT"}, 422, 42204),
            ("POST", "/subjects/a/versions", {"schema": V1, "id": 7, "version": 1}, 422, 42205),
            ("DELETE", "/subjects/clicks-value", None, 405, 405),
            ("DELETE", "/subjects/clicks-value/versions/1", None, 405, 405),
        ]
        for method, path, body, status, code in errors:
            assert (await client.ask(method, path, body, status=status))["error_code"] == code, path


@pytest.mark.parametrize("name", ["../x", "a/b", "a\x00b", "a b", ".a", "é", "x" * 256, "\u202ea"])
async def test_a_bad_name_is_refused(name: str) -> None:
    """Broken: a name reaches the file system, or an operator's terminal."""
    async with running_registry() as client:
        await client.ask("POST", f"/subjects/{quote(name, safe='')}/versions", {"schema": V1}, status=400)
        await client.ask("POST", "/v1/schemas", {"subject": name, "schema": V1}, status=400)


async def test_levels() -> None:
    """Broken: a level that somebody set does not count, or the wrong versions are compared."""
    async with running_registry() as client:
        assert await client.ask("GET", "/config") == {"compatibilityLevel": "BACKWARD"}
        await client.register("s", V1)
        body = {"schema": INCOMPATIBLE}
        verbose = await client.ask("POST", "/compatibility/subjects/s/versions/latest?verbose=true", body)
        assert not verbose["is_compatible"]
        assert "FIELD" in verbose["messages"][0]
        await client.ask("PUT", "/config/s", {"compatibility": "FORWARD"})
        assert await client.ask("POST", "/compatibility/subjects/s/versions", body) == {"is_compatible": True}
        assert (await client.register("s", INCOMPATIBLE))["version"] == 2
        await client.ask("DELETE", "/config/s")
        assert (await client.ask("GET", "/config/s?defaultToGlobal=true"))["compatibilityLevel"] == "BACKWARD"
        await client.ask("PUT", "/mode/s", {"mode": "READONLY"})
        await client.register("s", record(ID, PAGE, {"name": "b", "type": "int", "default": 0}), status=422)
        assert (await client.register("s", V1))["version"] == 1  # what is there is found


async def test_a_deprecated_version_counts_no_more_and_stays_readable() -> None:
    """Broken: a version that was registered by mistake blocks its subject for ever, or data written with it is lost."""
    async with running_registry() as client:
        await client.register("s", V1)
        wrong = record({"name": "id", "type": "long", "default": 0}, {"name": "oops", "type": "int", "default": 0})
        await client.register("s", wrong)
        fixed = record(ID, {"name": "oops", "type": "string", "default": ""})
        await client.register("s", fixed, status=409)
        body = {"deprecated": True, "note": "oops has the wrong type"}
        assert (await client.ask("PATCH", "/v1/subjects/s/versions/2", body))["note"] == body["note"]
        assert (await client.ask("GET", "/subjects/s/versions/latest"))["version"] == 1
        assert (await client.register("s", fixed))["version"] == 3
        assert (await client.ask("GET", "/subjects/s/versions/2"))["id"] == 2


async def test_references() -> None:
    """Broken: a schema that uses another one cannot be registered, or gets another identity than its whole text."""
    async with running_registry() as client:
        await client.register("address", record({"name": "street", "type": "string"}, name="com.acme.Address"))
        using = record({"name": "home", "type": "com.acme.Address"}, name="com.acme.Person")
        reference = {"name": "com.acme.Address", "subject": "address", "version": 1}
        body = {"schema": using, "references": [reference]}
        found = await client.ask("POST", "/subjects/person/versions", body)
        assert found["references"] == [reference]
        assert (await client.ask("GET", f"/schemas/ids/{found['id']}"))["references"] == [reference]
        assert await client.ask("GET", "/subjects/address/versions/1/referencedby") == [found["id"]]
        missing = {"schema": using, "references": [{**reference, "version": 2}]}
        await client.ask("POST", "/subjects/person/versions", missing, status=422)


async def test_references_have_a_bound() -> None:
    """Broken: references of references, each within its own bounds, end in a RecursionError, and so does each start."""
    async with running_registry() as client:
        await client.register("s0", record({"name": "x", "type": "int"}, name="R0"))
        for n in range(1, 30):
            reference = {"name": f"R{n - 1}", "subject": f"s{n - 1}", "version": 1}
            unused = record({"name": "x", "type": "int"}, name=f"R{n}")
            status = 200 if n <= MAX_REFERENCE_LEVELS - 1 else 422
            body = {"schema": unused, "references": [reference]}
            answer = await client.ask("POST", f"/subjects/s{n}/versions", body, status=status)
            if status == 422:
                assert "levels deep" in answer["message"]
                return
        pytest.fail("all references were accepted")


async def test_schemas_by_fingerprint() -> None:
    """Broken: a look-up that never changes is not cached, or finds another schema."""
    async with running_registry() as client:
        asked = await client.ask("POST", "/v1/schemas", {"schema": V1})
        assert asked["id"] is None
        made = await client.ask("POST", "/v1/schemas", {"schema": V1, "subject": "s"}, status=201)
        assert made["fingerprint"] == asked["fingerprint"]
        await client.ask("POST", "/v1/schemas", {"schema": V1, "subject": "s"})
        path = f"/v1/schemas/{made['fingerprint']}"
        for headers in ({}, {"Range": "bytes=0-"}):  # in front of aiohttp, and by it
            async with client.session.get(client.base + path, headers=headers) as answer:
                assert answer.status == 200
                assert "immutable" in answer.headers["Cache-Control"]
                assert (await answer.json())["schema"] == V1
        for query in (f"crc64={made['crc64']}", f"sha256={made['sha256']}", "name=com.acme.Click"):
            assert [one["id"] for one in (await client.ask("GET", f"/v1/schemas?{query}"))["schemas"]] == [1]
        await client.ask("GET", f"/v1/schemas/{'0' * 64}", status=404)


async def test_a_difference_has_a_patch() -> None:
    """Broken: the page and `penstock schemas diff` show nothing, or blame the wrong side."""
    async with running_registry() as client:
        await client.register("s", V1)
        body = {"from": {"subject": "s", "version": 1}, "to": {"schema": INCOMPATIBLE}}
        found = await client.ask("POST", "/v1/diff", body)
        assert found["levels"] == {"BACKWARD": False, "FORWARD": True, "FULL": False}
        assert [one["path"] for one in found["differences"] if one["breaks"]] == ["/fields/1"]
        checked = await client.ask("POST", "/v1/check", {"subject": "s", "schema": INCOMPATIBLE})
        assert not checked["compatible"]
        assert await client.ask("GET", "/subjects/s/versions") == [1]


async def test_one_patch_repairs_all_differences() -> None:
    """Broken: a producer applies the patch of a refusal and is refused again; or a way to ask has no patch."""
    ours = [{"name": name, "type": "int"} for name in ("a", "b", "c")]
    new: Any = {"type": "record", "name": "R", "fields": [{"name": "x", "type": "int"}, *ours]}
    async with running_registry() as client:
        await client.register("s", json.dumps({**new, "fields": [{"name": "x", "type": "int"}]}))
        checked = await client.ask("POST", "/v1/check", {"subject": "s", "schema": json.dumps(new)})
        assert len(checked["differences"]) == 3
        mended = apply_patch(new, checked["repair"])
        again = await client.ask("POST", "/v1/check", {"subject": "s", "schema": json.dumps(mended)})
        assert (again["compatible"], again["differences"], again["repair"]) == (True, [], None)
        assert {found["fix"] for found in checked["differences"]} == {None}
        refused = await client.register("s", json.dumps(new), status=409)
        body = {"schema": json.dumps(new)}
        verbose = await client.ask("POST", "/compatibility/subjects/s/versions/latest?verbose=true", body)
        sides = {"from": {"subject": "s", "version": 1}, "to": {"schema": json.dumps(new)}}
        compared = await client.ask("POST", "/v1/diff", sides)
        assert refused["repair"] == verbose["repair"] == compared["repair"] == checked["repair"]
        assert verbose["messages"][-1] in refused["message"]
        assert verbose["messages"][-1].startswith('Fix: [{"op":"add","path":"/fields/1/default"')


IDL = """@namespace("com.acme") protocol Shop {
  record Item { string name; }
  record Order { array<Item> items; }
}"""


async def test_a_protocol_is_registered_whole_or_not_at_all() -> None:
    """Broken: half of a protocol's types are registered, and the other half is refused."""
    objects = MemoryObjects()
    async with running_registry(objects) as client:
        made = await client.ask("POST", "/v1/protocols", {"text": IDL, "language": "avdl"}, status=201)
        assert [(one["subject"], one["version"]) for one in made["types"]] == [
            ("com.acme.Item", 1),
            ("com.acme.Order", 1),
        ]
        assert list(objects.contents) == [entry_name(1)]
        changed = IDL.replace("string name;", "string name; int count;").replace(
            "Shop {", "Shop { record New { int a; }"
        )
        refused = await client.ask("POST", "/v1/protocols", {"text": changed, "language": "avdl"}, status=409)
        assert refused["differences"]
        assert "com.acme.New" not in await client.ask("GET", "/subjects")
        bad = await client.ask(
            "POST", "/v1/protocols", {"text": "protocol X {\n  record }", "language": "avdl"}, status=422
        )
        assert bad["line"] == 2
        shown = await client.ask("GET", "/v1/protocols/com.acme.Shop")
        assert shown["text"] == IDL


async def test_a_check_of_a_protocol_names_the_type_and_stores_nothing() -> None:
    """Broken: CI learns only at the push that a type breaks its readers, or that some type does."""
    changed = IDL.replace("string name;", "string name; int size;")
    async with running_registry() as client:
        body = {"language": "avdl", "check": True}
        assert (await client.ask("POST", "/v1/protocols", {**body, "text": IDL}))["compatible"]
        assert await client.ask("GET", "/subjects") == []
        await client.ask("POST", "/v1/protocols", {"language": "avdl", "text": IDL}, status=201)
        refused = await client.ask("POST", "/v1/protocols", {**body, "text": changed}, status=409)
        assert {found["subject"] for found in refused["differences"]} == {"com.acme.Item", "com.acme.Order"}
        assert "com.acme.Item: /fields/1" in refused["detail"]
        item = refused["repairs"]["com.acme.Item"]
        assert item["patch"] == [{"op": "add", "path": "/fields/1/default", "value": 0}]
        mended = apply_patch(json.loads(item["schema"]), item["patch"])
        body = {"subject": "com.acme.Item", "schema": json.dumps(mended)}
        assert (await client.ask("POST", "/v1/check", body))["compatible"]
        assert len((await client.ask("GET", "/v1/subjects/com.acme.Item"))["versions"]) == 1


async def test_who_uses_a_subject() -> None:
    """Broken: nobody sees which pipe a change of a schema concerns."""
    async with running_registry() as client:
        await client.register("clicks-value", V1)
        await client.register("other", V1)
        clicks, other = (await client.ask("GET", "/v1/subjects"))["subjects"]
        assert (clicks["streams"], clicks["pipes"]) == (["clicks"], ["web"])
        assert (other["streams"], other["pipes"]) == ([], [])


async def test_two_registrations_at_once() -> None:
    """Broken: of two schemas that exclude each other both get a version, or both are refused."""
    objects = MemoryObjects()
    async with running_registry(objects) as one, running_registry(objects) as two:
        await one.register("s", record(ID))
        texts = [
            record(ID, {"name": "a", "type": kind, "default": default})
            for kind, default in (("int", 0), ("string", ""))
        ]

        async def register(base: str, text: str) -> int:
            async with one.session.post(f"{base}/subjects/s/versions", json={"schema": text}) as answer:
                return answer.status

        statuses = await asyncio.gather(register(one.base, texts[0]), register(two.base, texts[1]))
        assert sorted(statuses) == [200, 409]
        assert await one.ask("GET", "/subjects/s/versions") == [1, 2]


async def test_keys_and_tenants() -> None:
    """Broken: a tenant reads or changes another one's schemas."""
    made = "2026-01-01T00:00:00Z"
    reader, reader_key = make_key(streams=["clicks"], created=made)
    writer, writer_key = make_key(streams=["clicks"], scopes=["manage"], created=made)
    all_of_it, all_key = make_key(streams=["*"], scopes=["manage"], created=made)
    async with running_registry(keys=[reader_key, writer_key, all_key]) as client:
        await client.ask("GET", "/subjects", status=401)
        await client.ask("GET", f"/subjects?key={all_of_it}", status=401)
        client.key = all_of_it
        theirs = await client.register("orders-value", V2)
        await client.ask("PUT", "/config", {"compatibility": "NONE"})
        client.key = writer
        ours = await client.register("clicks-value", V1)
        assert await client.ask("GET", "/subjects") == ["clicks-value"]
        assert (await client.ask("GET", f"/schemas/ids/{ours['id']}"))["schema"] == V1
        fingerprint = (await client.ask("POST", "/v1/schemas", {"schema": V2}))["fingerprint"]
        await client.ask("GET", f"/schemas/ids/{theirs['id']}", status=404)
        await client.ask("GET", f"/schemas/guids/{theirs['guid']}", status=404)
        await client.ask("GET", f"/v1/schemas/{fingerprint}", status=404)
        await client.ask("GET", "/subjects/orders-value/versions/1", status=404)
        await client.register("orders-value", V1, status=404)
        await client.ask("PUT", "/config", {"compatibility": "FULL"}, status=403)
        client.key = reader
        await client.register("clicks-value", V2, status=403)
        async with client.session.get(
            f"{client.base}/schemas/ids/1", auth=None, headers={"Authorization": "Basic x"}
        ) as bad:
            assert bad.status == 401


async def test_an_expired_key_reads_nothing_from_memory() -> None:
    """Broken: the answer in memory outlives the key, and a revoked or expired one goes on reading."""
    token, key = make_key(streams=["*"], scopes=["manage"], created="2026-01-01T00:00:00Z")
    async with running_registry(keys=[key]) as client:
        client.key = token
        found = await client.register("s", V1)
        await client.ask("GET", f"/schemas/ids/{found['id']}")
        client.access.ring = type(client.access.ring)([])  # type: ignore[misc]  # revoked
        await client.ask("GET", f"/schemas/ids/{found['id']}", status=401)


async def test_another_host_name_is_refused() -> None:
    """Broken: a foreign web page reads schemas through a name that resolves to 127.0.0.1 (DNS rebinding)."""
    async with running_registry() as client:
        await client.register("s", V1)
        for path in ("/subjects", "/schemas/ids/1"):
            await client.ask("GET", path, status=421, headers={"Host": "evil.example"})


async def test_a_damaged_store_is_503_and_what_is_known_stays_readable() -> None:
    """Broken: a flipped bit in the store is served, or hides behind a 404."""
    objects = MemoryObjects()
    async with running_registry(objects) as client:
        await client.register("s", V1)
        await client.register("s", V2)
    objects.alter(entry_name(1))
    async with running_registry(objects) as client:
        for method, path, body in (
            ("GET", "/schemas/ids/1", None),
            ("GET", "/subjects/s/versions/latest", None),
            ("POST", "/subjects/s/versions", {"schema": V1}),
        ):
            refused = await client.ask(method, path, body, status=503)
            assert entry_name(1) in refused["message"]


async def test_a_store_that_is_away_stops_writes_and_no_reads_by_id() -> None:
    """Broken: consumers stop because a bucket does not answer."""
    objects = MemoryObjects()
    async with running_registry(objects) as client:
        found = await client.register("s", V1)
        objects.away = True
        assert (await client.ask("GET", f"/schemas/ids/{found['id']}"))["schema"] == V1
        await client.ask("GET", f"/schemas/ids/{found['id']}/schema")
        await client.register("s", V1)  # it is there already
        await client.ask("GET", "/schemas/ids/7", status=503)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"[]", {}, 400),
        (b"{}", {"Content-Type": "text/html"}, 415),
        (b"{}", {"Content-Encoding": "gzip"}, 415),
        (b" " * 5_000_000, {}, 413),
        (json.dumps({"schema": '{"type":"array","items":' * 5000 + '"int"' + "}" * 5000}).encode(), {}, 422),
    ],
)
async def test_bad_bodies(body: bytes, headers: dict[str, str], status: int) -> None:
    """Broken: a bad body is a fault of the server, or takes unbounded memory."""
    async with running_registry() as client:
        url = f"{client.base}/subjects/s/versions"
        async with client.session.post(
            url, data=body, headers={"Content-Type": "application/json", **headers}
        ) as answer:
            assert answer.status in ((400, 415) if status == 415 else (status,)), await answer.read()
