"""Schemas, protocols and IDL that were damaged at random: each is read or refused with a place, and nothing else happens."""

import json
import os
import random
from contextlib import suppress

import pytest

from services.core.avro.compatibility import Level, check
from services.core.avro.idl import parse_idl
from services.core.avro.json_document import SchemaError
from services.core.avro.parsing import parse_schema
from services.core.avro.protocol import parse_protocol
from services.core.avro.resolution import TooComplex
from services.core.avro.schema import Schema
from tests.support.avro import corpus_files
from tests.support.avro.pairs import pair

ROUNDS = int(os.environ.get("PENSTOCK_FUZZ_AVRO", "1500"))
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


@pytest.mark.parametrize("part", range(4))
def test_damaged_texts_are_read_or_refused(part: int) -> None:
    """Broken: a text from outside ends in an exception that nobody expects, and a service answers 500."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    idl = [path.read_bytes() for path in corpus_files.texts(".avdl")]
    protocols = [path.read_bytes() for path in corpus_files.texts(".avpr")]
    for _ in range(ROUNDS // 4):
        kind = (part + rng.randrange(2)) % 4
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
            check(Level.FULL, rng.choice(types), [rng.choice(types)])
