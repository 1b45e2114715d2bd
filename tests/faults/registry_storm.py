"""Four registries on one store that are killed at random moments, and the oracle over what they answered.

make soak ARGS="--registrations 10000 [--store s3]"      the long form of tests/faults/test_registry.py
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.faults.registry_child import open_registrar
from tests.support.object_store import BUCKET, ObjectStoreServer

REGISTRIES = 4
SUBJECTS = 7
_DEADLINE_S = 3600.0


class Storm:
    """What four registries were told. acked: every answered registration. kills: processes that were killed at work."""

    def __init__(self, url: str, seed: int) -> None:
        self._url, self._chance = url, random.Random(seed)
        self.acked: list[dict[str, Any]] = []
        self.kills = 0

    def run(self, registrations: int, kill_after: int) -> None:
        """Until so many were answered. A process is killed after up to twice `kill_after` answers, and another one begins."""
        running = [self._start(index) for index in range(REGISTRIES)]
        left = [self._life(kill_after) for _ in running]
        end = time.monotonic() + _DEADLINE_S
        try:
            while len(self.acked) < registrations:
                assert time.monotonic() < end, "the storm does not end"
                for index, child in enumerate(running):
                    assert child.stdout is not None
                    line = child.stdout.readline()
                    assert line, "a registry ended by itself"
                    self._note(line)
                    left[index] -= 1
                    if left[index] <= 0:
                        self._kill(child)
                        running[index], left[index] = (
                            self._start(index + REGISTRIES * self.kills),
                            self._life(kill_after),
                        )
        finally:
            for child in running:
                self._kill(child)

    def _life(self, kill_after: int) -> int:
        return self._chance.randint(1, 2 * kill_after)

    def _start(self, name: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "tests.faults.registry_child", self._url, f"p{name}", "0", str(SUBJECTS)]
        return subprocess.Popen(command, stdout=subprocess.PIPE)

    def _kill(self, child: "subprocess.Popen[bytes]") -> None:
        time.sleep(self._chance.random() * 0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
        self.kills += 1
        assert child.stdout is not None
        with child.stdout as rest:
            for line in rest.read().splitlines():
                self._note(line)

    def _note(self, line: bytes) -> None:
        self.acked.append(json.loads(line))


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
        run_storm(url, seed, registrations, 200)
    return 0


def run_storm(url: str, seed: int, registrations: int, kill_after: int) -> Storm:
    """A storm, checked. Prints its figures."""
    storm = Storm(url, seed)
    began = time.monotonic()
    storm.run(registrations, kill_after)
    took = time.monotonic() - began
    print(asyncio.run(check(url, storm)), f"{len(storm.acked) / took:.0f} registrations/s")
    return storm


def s3_environ(server: ObjectStoreServer) -> dict[str, str]:
    """Variables with which `obstore` reaches this server."""
    return {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "emulator",
        "AWS_SECRET_ACCESS_KEY": "emulator",
        "AWS_REGION": "us-east-1",
    }
