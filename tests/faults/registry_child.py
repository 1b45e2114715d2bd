"""A registry to kill: registers numbered schemas in a store, and says what was answered, line by line.

python -m tests.faults.registry_child URL NAME COUNT SUBJECTS      COUNT 0: until killed

Every second schema has the same text for all processes, so they race for it. One JSON line per registration, after its answer:
{"number": n, "subject": s, "version": v, "id": i, "fingerprint": f}.
"""

import asyncio
import itertools
import json
import os
import sys

import structlog

from services.registry.catalog import Catalog
from services.registry.object_log import ObjectLog
from services.registry.objects import StoreUnavailable, open_objects
from services.registry.registrar import Registrar


async def open_registrar(url: str) -> Registrar:
    """A registry without its HTTP server, everything read."""
    catalog = Catalog()
    log = ObjectLog(open_objects(url), catalog.clear, catalog.apply)
    await log.load()
    return Registrar(catalog, log)


def make_schema(name: str, number: int) -> str:
    """Registration `number` of process `name`; the even ones are the same for all names. Every schema reads every other one."""
    who = "all" if number % 2 == 0 else name
    field = {"name": f"f_{who}_{number}", "type": "int", "default": 0}
    return json.dumps({"type": "record", "name": "R", "namespace": "t", "fields": [field]})


async def _open_when_reachable(url: str) -> Registrar:
    while True:
        try:
            return await open_registrar(url)
        except StoreUnavailable:
            continue


async def register(url: str, name: str, count: int, subjects: int) -> None:
    """One registration at a time. A store without an answer is asked again."""
    registrar = await _open_when_reachable(url)
    for number in itertools.count() if not count else range(count):
        candidate = await registrar.read(make_schema(name, number))
        while True:
            try:
                version = await registrar.register(f"s{number % subjects}", candidate, name)
                break
            except StoreUnavailable:
                continue
        fact = {
            "number": number,
            "subject": f"s{number % subjects}",
            "version": version.number,
            "id": version.schema.id,
        }
        os.write(1, json.dumps({**fact, "fingerprint": candidate.parsed.fingerprint}).encode() + b"\n")


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout has the answers alone
    asyncio.run(register(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
