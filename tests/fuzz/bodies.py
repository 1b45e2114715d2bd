"""Requests with a good head and any body. Case N of a seed is always the same request."""

import gzip
import random
from dataclasses import dataclass, field

import zstandard

from tests.fuzz.corpus import MEDIA, ODD_MEDIA, SEEDS, Seed, bombs
from tests.fuzz.mutation import mutate, reshape

STREAM = "orders"
_BOMBS = bombs()
_TRACE = "00-%032x-00f067aa0ba902b7-01"


@dataclass(frozen=True)
class Body:
    """One request. body: as it goes over the wire. pieces: chunk sizes; none: with a Content-Length."""

    number: int
    body: bytes
    media: str
    encoding: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    pieces: tuple[int, ...] = field(default=(), repr=False)

    @property
    def is_binary(self) -> bool:
        """Whether its attributes are headers."""
        return any(name == "ce-specversion" for name, _ in self.headers)

    def render(self) -> bytes:
        """Head and body. The trace context carries the number into every record that comes of it."""
        lines = [f"POST /v1/streams/{STREAM}/events HTTP/1.1", "Host: localhost", "Prefer: return=representation"]
        lines.append(f"traceparent: {_TRACE % self.number}")
        if self.media:
            lines.append(f"Content-Type: {self.media}")
        if self.encoding:
            lines.append(f"Content-Encoding: {self.encoding}")
        lines += [f"{name}: {value}" for name, value in self.headers]
        lines.append("Transfer-Encoding: chunked" if self.pieces else f"Content-Length: {len(self.body)}")
        head = "\r\n".join([*lines, "", ""]).encode()
        return head + (make_chunks(self.body, self.pieces) if self.pieces else self.body)


def number_in(traceparent: bytes) -> int:
    """The number of the request whose record has this trace context."""
    return int(traceparent[3:35], 16)


def make_chunks(body: bytes, sizes: tuple[int, ...]) -> bytes:
    """A chunked body; the last size serves for the rest."""
    chunks, at, index = [], 0, 0
    while at < len(body):
        piece = body[at : at + sizes[min(index, len(sizes) - 1)]]
        chunks.append(b"%x\r\n%b\r\n" % (len(piece), piece))
        at, index = at + len(piece), index + 1
    return b"".join([*chunks, b"0\r\n\r\n"])


def make_body(seed: int, number: int) -> Body:
    """Case `number` (from 1): first every seed as it is, then mutations."""
    chance = random.Random(f"{seed} body {number}")
    if number <= len(SEEDS):
        return _wrap(number, SEEDS[number - 1], chance, whole=True)
    if number <= len(SEEDS) + len(_BOMBS):
        body, encoding = _BOMBS[number - len(SEEDS) - 1]
        return Body(number, body, MEDIA[0], encoding)
    start = chance.choice(SEEDS)
    body = start.body
    if chance.random() < 0.5:
        body = reshape(body, chance)
    if chance.random() < 0.5:
        body = mutate(body, chance)
    media = start.media
    if chance.random() < 0.1:
        media = chance.choice(ODD_MEDIA if chance.random() < 0.3 else MEDIA)
    return _wrap(number, Seed(body, media, start.headers), chance, whole=False)


def _wrap(number: int, seed: Seed, chance: random.Random, *, whole: bool) -> Body:
    """Compressed or not, chunked or not; compressed bytes are changed again now and then."""
    body, encoding = seed.body, chance.choice(("", "", "", "gzip", "zstd"))
    if encoding == "gzip":
        half = chance.randrange(len(body) + 1)
        parts = [body] if chance.random() < 0.7 else [body[:half], body[half:]]
        body = b"".join(gzip.compress(part, chance.choice((1, 9)), mtime=0) for part in parts)
    elif encoding == "zstd":
        stream = zstandard.ZstdCompressor(write_checksum=chance.random() < 0.5).compressobj()
        body = zstandard.compress(body) if chance.random() < 0.5 else stream.compress(body) + stream.flush()
    if encoding and not whole and chance.random() < 0.4:
        body = mutate(body, chance)
    pieces = tuple(chance.choice((1, 7, 100, 5000)) for _ in range(3)) if chance.random() < 0.3 else ()
    if pieces and len(body) > 10_000:
        pieces = (*pieces, 5000)
    return Body(number, body, seed.media, encoding, seed.headers, pieces)
