"""Changes to bytes and to JSON values. Everything is a function of the given source of chance; sizes stay bounded."""

import json
import random
from typing import Any

from tests.fuzz.corpus import MAX_BODY, SEEDS, TOKENS, VALUES

MAX_BYTES = MAX_BODY + MAX_BODY // 4
_NUMBERS = b"0123456789"


def mutate(data: bytes, chance: random.Random) -> bytes:
    """One to four changes of any kind."""
    for _ in range(chance.choice((1, 1, 1, 2, 2, 4))):
        data = chance.choice(_CHANGES)(data, chance)[:MAX_BYTES]
    return data


def reshape(body: bytes, chance: random.Random) -> bytes:
    """The JSON text with some values or names replaced; still JSON, in another notation. Other text comes back as it is."""
    lines = body.split(b"\n") if body.count(b"\n") > 1 else [body]
    try:
        documents = [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError):
        return body
    for _ in range(chance.choice((1, 1, 2, 5)) if documents else 0):
        place = chance.randrange(len(documents))
        documents[place] = _replace(documents[place], chance)
    separators = chance.choice(((",", ":"), (", ", ": "), (" ,\t", " :  ")))
    texts = [json.dumps(one, ensure_ascii=chance.random() < 0.5, separators=separators) for one in documents]
    return "\n".join(texts).encode(errors="surrogatepass")


def _replace(value: Any, chance: random.Random) -> Any:
    """A copy of a JSON value in which one place is another value."""
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        return [*value[:place], _replace(value[place], chance), *value[place + 1 :]]
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(list(value))
        if chance.random() < 0.1:
            return {("" if name == one else one): content for one, content in value.items()}
        return {**value, name: _replace(value[name], chance)}
    return chance.choice(VALUES)


def _slice(data: bytes, chance: random.Random) -> slice:
    start = chance.randrange(len(data) + 1)
    return slice(start, start + chance.choice((1, 1, 4, 16, 200, 2000)))


def _flip(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 10)) if data else 0):
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _remove(data: bytes, chance: random.Random) -> bytes:
    gone = _slice(data, chance)
    return data[: gone.start] + data[gone.stop :]


def _repeat(data: bytes, chance: random.Random) -> bytes:
    piece = _slice(data, chance)
    return data[: piece.start] + data[piece] * chance.choice((2, 2, 10, 150)) + data[piece.stop :]


def _splice(data: bytes, chance: random.Random) -> bytes:
    other = chance.choice(SEEDS).body
    return _cut(data, chance) + other[chance.randrange(len(other) + 1) :]


def _insert(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data) + 1)
    return data[:place] + chance.choice(TOKENS) + data[place:]


def _overwrite(data: bytes, chance: random.Random) -> bytes:
    piece = _slice(data, chance)
    return data[: piece.start] + chance.randbytes(len(data[piece])) + data[piece.stop :]


def _renumber(data: bytes, chance: random.Random) -> bytes:
    """Another number in the place of one digit."""
    places = [place for place, digit in enumerate(data[:5000]) if digit in _NUMBERS]
    if not places:
        return data
    place = chance.choice(places)
    return data[:place] + chance.choice((b"-1", b"1e999", b"99999999999999999999", b"0.5", b"")) + data[place + 1 :]


_CHANGES = (_flip, _cut, _remove, _repeat, _splice, _insert, _overwrite, _renumber)
