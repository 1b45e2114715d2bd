"""Existing clients of Confluent's schema registry, unmodified, against ours: PyPI's confluent-kafka and two of npm."""

import asyncio
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka.schema_registry import (
    Schema,
    SchemaReference,
    SchemaRegistryClient,
    SchemaRegistryError,
    dual_schema_id_deserializer,
    header_schema_id_serializer,
)
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from tests.support.ports import free_port
from tests.support.schema_clients import FOLDER, install
from tests.unit.registry.service import running_registry

DEADLINE = 600
CLICK = '{"type":"record","name":"Click","namespace":"com.acme","fields":[{"name":"page","type":"string"}]}'
WIDER = CLICK.replace("]}", ',{"name":"user","type":"long"}]}')
ADDRESS = '{"type":"record","name":"Address","namespace":"com.acme","fields":[{"name":"street","type":"string"}]}'
PERSON = '{"type":"record","name":"Person","namespace":"com.acme","fields":[{"name":"home","type":"com.acme.Address"}]}'


def use_confluent_kafka(url: str) -> None:
    """What its documentation shows."""
    with SchemaRegistryClient({"url": url}) as client:
        register(client)
    with SchemaRegistryClient({"url": url}) as writer, SchemaRegistryClient({"url": url}) as reader:
        round_trip(writer, reader)


def register(client: SchemaRegistryClient) -> None:
    first = client.register_schema("clicks-value", Schema(CLICK))
    assert client.register_schema("again-value", Schema(CLICK)) == first
    assert client.get_subjects() == ["again-value", "clicks-value"]
    latest = client.get_latest_version("clicks-value")
    assert (latest.version, latest.schema_id) == (1, first)
    assert client.get_schema_by_guid(str(latest.guid)).schema_str == CLICK
    assert client.lookup_schema("clicks-value", Schema(CLICK)).version == 1
    assert not client.test_compatibility("clicks-value", Schema(WIDER))
    with pytest.raises(SchemaRegistryError, match=r"/fields/1.*user.*Fix") as refused:
        client.register_schema("clicks-value", Schema(WIDER))
    assert (refused.value.http_status_code, refused.value.error_code) == (409, 409)
    with pytest.raises(SchemaRegistryError) as missing:
        client.get_latest_version("none")
    assert missing.value.error_code == 40401
    with pytest.raises(SchemaRegistryError) as kept:
        client.delete_subject("clicks-value")
    assert kept.value.http_status_code == 405
    client.set_compatibility("clicks-value", "FORWARD")
    assert client.get_compatibility("clicks-value") == "FORWARD"
    assert client.register_schema("clicks-value", Schema(WIDER)) == first + 1


def round_trip(client: SchemaRegistryClient, other: SchemaRegistryClient) -> None:
    """The five-byte prefix with a schema that references another one; then the GUID in a header."""
    client.register_schema("address", Schema(ADDRESS))
    person = Schema(PERSON, "AVRO", [SchemaReference("com.acme.Address", "address", 1)])
    where = SerializationContext("people", MessageField.VALUE, [])
    value = {"home": {"street": "Main Street"}}
    packed = AvroSerializer(client, person)(value, where)
    assert packed is not None
    assert packed[0] == 0
    assert AvroDeserializer(other)(packed, where) == value
    headed = AvroSerializer(
        client,
        person,
        conf={
            "auto.register.schemas": False,
            "use.latest.version": True,
            "schema.id.serializer": header_schema_id_serializer,
        },
    )(value, where)
    reader = AvroDeserializer(other, conf={"schema.id.deserializer": dual_schema_id_deserializer})
    assert len(where.headers or []) == 1
    assert reader(headed, where) == value


async def test_confluent_kafka() -> None:
    """Broken: a Python producer or consumer must be changed to use this registry."""
    async with running_registry() as client:
        await asyncio.to_thread(use_confluent_kafka, client.base)


async def test_a_client_with_a_key_and_a_registry_in_a_folder(tmp_path: Path) -> None:
    """Broken: a client that knows only user and password cannot use a registry with keys; or a killed registry forgets."""
    await asyncio.to_thread((tmp_path / "pipes.yaml").write_text, "version: 1\nstreams: {clicks: {}, again: {}}\n")
    keys = ("--keys", str(tmp_path / "keys.yaml"))
    make = ("-m", "services.fleet", "keys", "create", "--name", "ann", "--stream", "*", "--manage", *keys)
    made = await asyncio.create_subprocess_exec(sys.executable, *make, stdout=asyncio.subprocess.PIPE)
    key = (await made.communicate())[0].decode().strip()
    port = free_port()
    where = ("--pipes", str(tmp_path / "pipes.yaml"), "--store", f"file://{tmp_path}/store", *keys)
    command = ("-m", "services.registry", "--listen", f"127.0.0.1:{port}", *where)
    url = f"http://127.0.0.1:{port}"

    def use(password: str, act: Callable[[SchemaRegistryClient], None]) -> None:
        with SchemaRegistryClient({"url": url, "basic.auth.user.info": f"ann:{password}"}) as client:
            act(client)

    for act in (register, lookup):
        server = await asyncio.create_subprocess_exec(sys.executable, *command)
        try:
            async with asyncio.timeout(DEADLINE):
                while not await asyncio.to_thread(is_open, port):
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(use, key, act)
            with pytest.raises(SchemaRegistryError, match="401"):
                await asyncio.to_thread(use, key[:-1] + "!", act)
        finally:
            server.kill()
            await server.wait()


def lookup(client: SchemaRegistryClient) -> None:
    assert client.get_subjects() == ["again-value", "clicks-value"]
    assert client.get_latest_version("clicks-value").version == 2


def is_open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


async def test_the_clients_of_npm() -> None:
    """Broken: a Node producer or consumer must be changed to use this registry."""
    folder = await asyncio.to_thread(install)
    node = shutil.which("node")
    assert node is not None, "Try: make setup"
    environ = {**os.environ, "NODE_PATH": str(Path(folder, "node_modules"))}
    async with running_registry() as client:
        command = (node, str(FOLDER / "client.js"), client.base)
        run = await asyncio.create_subprocess_exec(
            *command, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        async with asyncio.timeout(DEADLINE):
            said, _ = await run.communicate()
        assert run.returncode == 0, said.decode()
        assert json.loads(said) == [1, 1]
