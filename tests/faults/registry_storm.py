"""Four registries on one store that are killed at random moments, and the oracle over what they answered.

make soak ARGS="--registrations 10000 [--store s3]"      the long form of tests/faults/test_registry.py
"""

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession

from tests.faults.registry_child import make_schema, open_registrar
from tests.support.object_store import BUCKET, ObjectStoreServer
from tests.support.ports import free_port

REGISTRIES = 4
SUBJECTS = 7
_DEADLINE_S = 3600.0
_REPEATS = 0.2
"""The part of the requests that register again what the same client has registered before."""


class Storm:
    """What four registries answered. Each is a process of its own with a client of its own, who repeats a request until it is
    answered, as producers do. acked: every answered registration. kills: processes that were killed at work."""

    def __init__(self, url: str, seed: int, folder: Path) -> None:
        self._url, self._chance = url, random.Random(seed)
        self._pipes = folder / "storm.yaml"
        self._pipes.write_text("version: 1\nstreams: {a: {}}\n")
        self.acked: list[dict[str, Any]] = []
        self.kills = 0

    async def run(self, registrations: int, kill_after: int) -> None:
        """Until so many were answered. A process is killed after up to twice `kill_after` answers, and another one begins."""
        async with asyncio.timeout(_DEADLINE_S), ClientSession() as session, asyncio.TaskGroup() as group:
            clients = []
            killers = []
            for index in range(REGISTRIES):
                port, answers = free_port(), asyncio.Queue[None]()
                clients.append(group.create_task(self._register(f"p{index}", port, session, answers)))
                killers.append(group.create_task(self._keep_killing(port, answers, registrations, kill_after)))
            await asyncio.wait(killers)
            for client in clients:
                client.cancel()

    async def _keep_killing(self, port: int, answers: asyncio.Queue[None], registrations: int, kill_after: int) -> None:
        while len(self.acked) < registrations:
            process = await self._start(port)
            ended = asyncio.create_task(process.wait())
            used = asyncio.create_task(self._use(answers, self._chance.randint(1, 2 * kill_after), registrations))
            try:
                await asyncio.wait({ended, used}, return_when=asyncio.FIRST_COMPLETED)
                assert not ended.done(), f"a registry ended by itself, with {process.returncode}"
                await asyncio.sleep(self._chance.random() * 0.01)
                self.kills += len(self.acked) < registrations
            finally:
                used.cancel()
                if process.returncode is None:
                    process.kill()
                await ended

    async def _use(self, answers: asyncio.Queue[None], count: int, registrations: int) -> None:
        """Until this registry gave so many answers, or all gave enough."""
        for _ in range(count):
            await answers.get()
            if len(self.acked) >= registrations:
                return

    async def _start(self, port: int) -> asyncio.subprocess.Process:
        where = (
            "--pipes",
            str(self._pipes),
            "--store",
            self._url,
            "--listen",
            f"127.0.0.1:{port}",
            "--log-level",
            "error",
        )
        return await asyncio.create_subprocess_exec(sys.executable, "-m", "services.registry", *where)

    async def _register(self, name: str, port: int, session: ClientSession, answers: asyncio.Queue[None]) -> None:
        number = 0
        while True:
            is_repeat = number > 0 and self._chance.random() < _REPEATS
            this = self._chance.randrange(number) if is_repeat else number
            body = {"subject": f"s{this % SUBJECTS}", "schema": make_schema(name, this)}
            self.acked.append(await self._ask(f"http://127.0.0.1:{port}/v1/schemas", session, body))
            answers.put_nowait(None)
            number += not is_repeat

    async def _ask(self, url: str, session: ClientSession, body: dict[str, str]) -> dict[str, Any]:
        """The answer. A registry that is not there, ends meanwhile or has no store is asked again."""
        while True:
            try:
                async with session.post(url, json=body) as response:
                    answer: dict[str, Any] = json.loads(await response.read())
                    assert response.status in (200, 201, 503), answer
                    if response.status != 503:
                        return answer
            except (ClientError, ConnectionError):
                pass
            await asyncio.sleep(0.02)


async def check(url: str, storm: Storm) -> dict[str, object]:
    """No duplicate, no gap, no loss. Returns figures, with the time of a start."""
    began = time.monotonic()
    registrar = await open_registrar(url)
    took = time.monotonic() - began
    catalog = registrar.catalog
    assert not registrar.log.damage
    assert sorted(catalog.by_id) == list(range(1, len(catalog.by_id) + 1)), "ids have a gap"
    assert len({schema.stored.fingerprint for schema in catalog.by_id.values()}) == len(catalog.by_id), (
        "a schema has two ids"
    )
    for subject in catalog.subjects.values():
        numbers = [version.number for version in subject.versions]
        assert numbers == list(range(1, len(numbers) + 1)), "versions have a gap"
        ids = [version.schema.id for version in subject.versions]
        assert len(set(ids)) == len(ids), "a schema has two versions"
    for fact in storm.acked:
        version = catalog.subjects[fact["subject"]].versions[fact["version"] - 1]
        found = (version.schema.id, version.schema.stored.fingerprint)
        assert found == (fact["id"], fact["fingerprint"]), f"an answered registration is lost: {fact}"
    return {
        "registrations": len(storm.acked),
        "kills": storm.kills,
        "schemas": len(catalog.by_id),
        "entries": registrar.log.number,
        "start_seconds": round(took, 3),
    }


def run(registrations: int, store: str, seed: int) -> int:
    """The long form, on a folder or on `s3`. The exit status."""
    print("seed", seed, flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        url = f"file://{folder}/store"
        if store == "s3":
            os.environ.update(s3_environ(stack.enter_context(ObjectStoreServer(Path(folder)))))
            url = f"s3://{BUCKET}/store"
        asyncio.run(run_storm(url, seed, Path(folder), registrations, 200))
    return 0


async def run_storm(url: str, seed: int, folder: Path, registrations: int, kill_after: int) -> Storm:
    """A storm, checked. Prints its figures. folder: for its pipe file."""
    storm = Storm(url, seed, folder)
    began = time.monotonic()
    await storm.run(registrations, kill_after)
    took = time.monotonic() - began
    print(await check(url, storm), f"{len(storm.acked) / took:.0f} registrations/s")
    return storm


def s3_environ(server: ObjectStoreServer) -> dict[str, str]:
    """Variables with which `obstore` reaches this server."""
    return {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "emulator",
        "AWS_SECRET_ACCESS_KEY": "emulator",
        "AWS_REGION": "us-east-1",
    }
