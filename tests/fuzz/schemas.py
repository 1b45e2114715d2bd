"""Damaged schemas, protocols, IDL and requests to the registry: each is read or refused with a place, and nothing else happens.

make soak ARGS="--fuzz-schemas 60"      so many seconds of it; the tests do 20
"""

import asyncio
import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from services.core.avro.compatibility import Level
from services.core.avro.idl import parse_idl
from services.core.avro.json_document import SchemaError
from services.core.avro.parsing import parse_schema
from services.core.avro.protocol import parse_protocol
from services.core.avro.repair import compare
from services.core.avro.resolution import TooComplex
from services.core.avro.schema import Schema
from tests.support.avro import corpus_files
from tests.support.avro.pairs import pair
from tests.unit.registry.service import Client, running_registry

PIECES = [
    piece.encode("utf-8", "surrogatepass")
    for piece in (
        *(
            '"',
            "\\",
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            "null",
            "-1",
            "1e999",
            "9" * 20,
            '"type"',
            '"default":',
            '"name":"a",',
            "\0",
        ),
        *("\ud800", "\\ud800", "\u202e", "/**", "*/", "//", "`", "@", "<", ">", "?", ";", "union {", "\x1a"),
    )
]


def damaged(rng: random.Random, text: bytes) -> bytes:
    """The text after a few edits: pieces put in, cut out, doubled, changed."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        start = rng.randint(0, len(text))
        end = min(len(text), start + rng.choice((0, 1, 3, 20, 200)))
        middle = rng.choice((b"", rng.choice(PIECES), rng.choice(PIECES) * 300, text[start:end] * 2, rng.randbytes(3)))
        text = text[:start] + middle + text[end:]
    return text


def texts(rng: random.Random, rounds: int) -> None:
    """Read so many damaged texts. Raises AssertionError, and what the code under test should not raise."""
    idl = [path.read_bytes() for path in corpus_files.texts(".avdl")]
    protocols = [path.read_bytes() for path in corpus_files.texts(".avpr")]
    for _ in range(rounds):
        kind = rng.randrange(4)
        match kind:
            case 0:
                text = damaged(rng, rng.choice(idl))
            case 1:
                text = damaged(rng, rng.choice(protocols))
            case _:
                text = damaged(rng, json.dumps(pair(rng.randrange(1 << 32))[0], indent=rng.choice((None, 1))).encode())
        _read(text, kind, rng)


def _read(text: bytes, kind: int, rng: random.Random) -> None:
    try:
        if kind == 0:
            types: tuple[Schema, ...] = parse_idl(text, load=corpus_files.load).types
        elif kind == 1:
            types = parse_protocol(text).types
        else:
            types = (parse_schema(text),)
    except SchemaError as error:
        place = error.line, error.column
    else:
        _use(types, rng)
        return
    assert min(place) >= 1, text


def _use(types: tuple[Schema, ...], rng: random.Random) -> None:
    for schema in types:
        assert len(schema.fingerprint) == 64
        assert parse_schema(json.dumps(schema.to_json())).fingerprint == schema.fingerprint
    if len(types) > 1:
        with suppress(TooComplex):
            compare(Level.FULL, rng.choice(types), [rng.choice(types)])


ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    7,
    2**31,
    1e300,
    "",
    "latest",
    "7",
    "../x",
    "\u202e",
    "x" * 300,
    [],
    [[]],
    {},
    {"a": 1},
    ["s"],
]
SCHEMA = '{"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]}'
REFERENCE = {"name": "R", "subject": "s", "version": 1}
REQUESTS: list[tuple[str, str, dict[str, Any] | None]] = [
    (
        "POST",
        "/subjects/{}/versions",
        {"schema": SCHEMA, "schemaType": "AVRO", "references": [REFERENCE], "id": -1, "version": -1},
    ),
    ("POST", "/subjects/{}", {"schema": SCHEMA, "references": [REFERENCE]}),
    ("POST", "/compatibility/subjects/{}/versions/{}", {"schema": SCHEMA}),
    ("POST", "/compatibility/subjects/{}/versions", {"schema": SCHEMA}),
    ("PUT", "/config/{}", {"compatibility": "FULL"}),
    ("PUT", "/mode/{}", {"mode": "READWRITE"}),
    ("DELETE", "/config/{}", None),
    ("GET", "/subjects?offset={}&limit={}&subjectPrefix={}", None),
    ("GET", "/subjects/{}/versions/{}", None),
    ("GET", "/subjects/{}/versions/{}/referencedby", None),
    ("GET", "/schemas/ids/{}", None),
    ("GET", "/schemas/guids/{}", None),
    ("GET", "/schemas?subjectPrefix={}&latestOnly={}", None),
    ("GET", "/v1/schemas/{}", None),
    ("GET", "/v1/schemas?name={}", None),
    ("POST", "/v1/schemas", {"subject": "s", "schema": SCHEMA, "references": [REFERENCE]}),
    ("POST", "/v1/check", {"subject": "s", "schema": SCHEMA}),
    ("POST", "/v1/diff", {"from": {"schema": SCHEMA}, "to": {"subject": "s", "version": 1}}),
    ("POST", "/v1/diff", {"from": {"id": 1}, "to": {"fingerprint": "0" * 64}}),
    ("PATCH", "/v1/subjects/{}/versions/{}", {"deprecated": True, "note": "why"}),
    (
        "POST",
        "/v1/protocols",
        {"text": 'protocol P { import idl "a"; }', "language": "avdl", "imports": {"a": "protocol A {}"}},
    ),
]


async def requests(rng: random.Random, rounds: int) -> None:
    """Send so many damaged requests to one registry: each is answered in JSON, and none with 500."""
    async with running_registry() as client:
        await client.register("s", SCHEMA)
        for _ in range(rounds):
            method, path, body = rng.choice(REQUESTS)
            filled = path.format(*(_part(rng) for _ in range(path.count("{}"))))
            await _send(client, method, filled, _odd(rng, body))


def _part(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(("s", "1", "latest"))
    return quote(str(rng.choice(ODD)), safe="") or "x"


def _odd(rng: random.Random, value: Any) -> Any:
    """The value, with some parts replaced or left out."""
    if rng.random() < 0.15:
        return rng.choice(ODD)
    if isinstance(value, dict):
        return {key: _odd(rng, part) for key, part in value.items() if rng.random() < 0.9}
    return [_odd(rng, part) for part in value] if isinstance(value, list) else value


async def _send(client: Client, method: str, path: str, body: Any) -> None:
    sent = None if body is None else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    async with client.session.request(method, client.base + path, data=sent, headers=headers) as answer:
        content = await answer.read()
        assert answer.status != 500, (method, path, sent)
        json.loads(content)


def run(seconds: float, seed: int) -> int:
    """For so long. The exit status."""
    print("seed", seed, flush=True)
    rng, end, done = random.Random(seed), time.monotonic() + seconds, [0, 0]
    work: list[Callable[[], object]] = [lambda: texts(rng, 50), lambda: asyncio.run(requests(rng, 50))]
    while time.monotonic() < end:
        for index, one in enumerate(work):
            one()
            done[index] += 50
    print(f"{done[0]:,} texts and {done[1]:,} requests: each read, answered or refused")
    return 0
