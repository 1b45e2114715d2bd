"""Keys that cover some subjects: another tenant's schemas do not exist for them, by any path."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.core.security.keys import make_key
from tests.unit.registry.service import Client, running_registry

SECRET = '{"type": "record", "name": "com.acme.Secret", "fields": [{"name": "plan", "type": "string"}]}'
USES_SECRET = '{"type": "record", "name": "com.acme.Mine", "fields": [{"name": "theirs", "type": "com.acme.Secret"}]}'
SECRET_REFERENCE = [{"name": "com.acme.Secret", "subject": "orders-value", "version": 1}]
PLAIN = '{"type": "record", "name": "com.acme.Click", "fields": [{"name": "id", "type": "long"}]}'


@asynccontextmanager
async def tenants() -> AsyncIterator[tuple[Client, str]]:
    """A registry with a schema of the stream orders; the client has the key of the stream clicks. Also a key of everything."""
    made = "2026-01-01T00:00:00Z"
    ours, our_key = make_key(streams=["clicks"], scopes=["manage"], created=made)
    wide, wide_key = make_key(streams=["*"], scopes=["manage"], created=made)
    async with running_registry(keys=[our_key, wide_key]) as client:
        client.key = wide
        await client.register("orders-value", SECRET)
        client.key = ours
        yield client, wide


async def test_a_reference_reads_no_schema_of_another_tenant() -> None:
    """Broken: who may register may read every schema, by referring to it and asking for the difference."""
    body = {"schema": USES_SECRET, "references": SECRET_REFERENCE}
    async with tenants() as (client, wide):
        other = [{**SECRET_REFERENCE[0], "subject": "nobody-value"}]
        unknown = await client.ask("POST", "/v1/schemas", {**body, "references": other}, status=422)
        for path, sent in (
            ("/v1/schemas", body),
            ("/v1/schemas", {**body, "subject": "clicks-value"}),
            ("/v1/check", {**body, "subject": "clicks-value"}),
            ("/v1/diff", {"from": body, "to": body}),
            ("/subjects/clicks-value/versions", body),
            ("/compatibility/subjects/clicks-value/versions", body),
        ):
            refused = await client.ask("POST", path, sent, status=422)
            assert "plan" not in str(refused)
            said = refused.get("detail", refused.get("message"))
            assert unknown["detail"].replace("nobody", "orders") in said, "it differs from a subject that is not there"
        client.key = wide
        await client.ask("POST", "/subjects/mixed-value/versions", body)


async def test_who_refers_to_a_schema_names_no_schema_of_another_tenant() -> None:
    """Broken: a tenant learns the ids of another one's schemas."""
    async with tenants() as (client, wide):
        client_key, client.key = client.key, wide
        await client.register("clicks-value", PLAIN)
        mine = [{"name": "com.acme.Click", "subject": "clicks-value", "version": 1}]
        uses = '{"type": "array", "items": "com.acme.Click"}'
        await client.ask("POST", "/subjects/orders-key/versions", {"schema": uses, "references": mine})
        assert len(await client.ask("GET", "/subjects/clicks-value/versions/1/referencedby")) == 1
        client.key = client_key
        assert await client.ask("GET", "/subjects/clicks-value/versions/1/referencedby") == []
        assert (await client.ask("POST", "/v1/schemas", {"schema": SECRET}))["id"] is None


@pytest.mark.parametrize(
    ("subject", "status"),
    [
        ("clicks", 200),
        ("clicks-key", 200),
        ("clicks-com.acme.Click", 200),
        ("clicks-eu-value", 404),
        ("clicks2-value", 404),
    ],
)
async def test_a_key_covers_no_stream_whose_name_begins_as_its_own(subject: str, status: int) -> None:
    """Broken: the key of the stream clicks changes the schemas of the stream clicks-eu."""
    async with tenants() as (client, _):
        await client.register(subject, PLAIN, status=status)


async def test_nobody_takes_the_name_of_another_tenants_protocol() -> None:
    """Broken: a tenant's protocol hides another one's of the same name."""
    text = "protocol Shop { record %s { long id; } }"
    made = "2026-01-01T00:00:00Z"
    first, first_key = make_key(streams=["a"], scopes=["manage"], created=made)
    second, second_key = make_key(streams=["b"], scopes=["manage"], created=made)
    async with running_registry(keys=[first_key, second_key]) as client:
        client.key = first
        await client.ask("POST", "/v1/protocols", {"text": text % "a", "language": "avdl"}, status=201)
        client.key = second
        await client.ask("POST", "/v1/protocols", {"text": text % "b", "language": "avdl"}, status=422)
        client.key = first
        assert "record a" in (await client.ask("GET", "/v1/protocols/Shop"))["text"]
