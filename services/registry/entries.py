"""What the registry stores: entries of its log, as objects that carry their own hash.

An object is one line `penstock-registry 1 sha256=HEX` and one line of JSON; the hash is of the second line. A person
can check one with `tail -n 1 OBJECT | sha256sum` (without its line end). A segment has the objects of consecutive entries under a
line of its own, for a quick start.
"""

import hashlib
import re
from collections.abc import Sequence

import msgspec

from services.core.version import VERSION, newer_format

FORMAT = 1
SEGMENT = 256
"""Entries in one segment."""
_HEAD = re.compile(rb"penstock-registry (\d{1,6}) sha256=([0-9a-f]{64})")


class Damaged(Exception):
    """A stored object is missing, altered, or no object of this registry. The message names it and says what to do."""


class Reference(msgspec.Struct, frozen=True):
    """A schema that another one uses: a version of a subject. name: of the type, as the schema writes it."""

    name: str
    subject: str
    version: int


class AddSchema(msgspec.Struct, frozen=True, tag="schema"):
    """A new schema gets its id. fingerprint: of the resolution form; sha256, crc64: of Avro's parsing form; all in hex."""

    id: int
    fingerprint: str
    sha256: str
    crc64: str
    name: str
    schema: str
    references: tuple[Reference, ...] = ()


class AddVersion(msgspec.Struct, frozen=True, tag="version"):
    """A subject gets its next version."""

    subject: str
    version: int
    id: int
    protocol: str = ""
    """The protocol that it came with."""


class SetLevel(msgspec.Struct, frozen=True, tag="level"):
    """A compatibility level. subject: None: the default of all. level: None: the default applies again."""

    subject: str | None
    level: str | None


class SetMode(msgspec.Struct, frozen=True, tag="mode"):
    """READWRITE, or READONLY: no registration. As `SetLevel`."""

    subject: str | None
    mode: str | None


class Deprecate(msgspec.Struct, frozen=True, tag="deprecate"):
    """Says of one version, or of all versions of a subject (None), whether people should use it. It stays readable."""

    subject: str
    version: int | None
    deprecated: bool
    note: str = ""


class AddProtocol(msgspec.Struct, frozen=True, tag="protocol"):
    """A version of a protocol. text: as the client sent it; language: avpr or avdl. types: subjects and versions, which
    this entry added or which were there."""

    name: str
    version: int
    language: str
    sha256: str
    text: str
    types: tuple[tuple[str, int], ...] = ()


Change = AddSchema | AddVersion | SetLevel | SetMode | Deprecate | AddProtocol


class Entry(msgspec.Struct, frozen=True):
    """One object of the log: changes that happen together or not at all.

    number: from 1, without a gap. time: ms. by: the id of the API key. previous: the hash of the entry before, "" for the first.
    nonce: tells the writer that this entry is its own. writer: the version of Penstock.
    """

    number: int
    time: int
    by: str
    nonce: str
    previous: str
    changes: tuple[Change, ...]
    writer: str = VERSION


class Stored(msgspec.Struct, frozen=True):
    """An entry with its object. hash: in hex."""

    entry: Entry
    hash: str
    content: bytes


def entry_name(number: int) -> str:
    return f"log/{number:012d}"


def segment_name(number: int) -> str:
    """The object of the entries `number * SEGMENT + 1` and following."""
    return f"segments/{number:012d}"


def store_entry(entry: Entry) -> Stored:
    body = msgspec.json.encode(entry)
    digest = hashlib.sha256(body).hexdigest()
    return Stored(entry, digest, b"penstock-registry %d sha256=%b\n%b" % (FORMAT, digest.encode(), body))


def read_entry(name: str, number: int, content: bytes) -> Stored:
    """The entry of an object. Raises Damaged, also for a whole object that has another number than its name."""
    digest, body = _open(name, content)
    try:
        entry = _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise Damaged(f"object {name} is no entry: {error}") from error
    if entry.number != number:
        raise Damaged(f"object {name} has entry {entry.number}. {_RESTORE}")
    return Stored(entry, digest, content)


def make_segment(entries: Sequence[Stored]) -> bytes:
    """The object of exactly SEGMENT entries. Every process makes the same one."""
    body = b"\n".join([stored.content for stored in entries])
    return b"penstock-registry %d sha256=%b\n%b" % (FORMAT, hashlib.sha256(body).hexdigest().encode(), body)


def read_segment(number: int, content: bytes) -> list[Stored]:
    """Its entries. Raises Damaged."""
    name = segment_name(number)
    _, body = _open(name, content)
    lines = body.split(b"\n")
    if len(lines) != 2 * SEGMENT:
        raise Damaged(f"object {name} has {len(lines) // 2} entries instead of {SEGMENT}. {_RESTORE}")
    first = number * SEGMENT + 1
    return [
        read_entry(name, first + index, b"%b\n%b" % (lines[2 * index], lines[2 * index + 1]))
        for index in range(SEGMENT)
    ]


_DECODER = msgspec.json.Decoder(Entry)
_RESTORE = (
    "Try: restore it from a backup, or from its earlier version in the bucket; the registry then goes on by itself"
)


def missing(name: str) -> Damaged:
    """For an object that must exist."""
    return Damaged(f"object {name} is missing, and later ones exist. {_RESTORE}")


def _open(name: str, content: bytes) -> tuple[str, bytes]:
    head, _, body = content.partition(b"\n")
    found = _HEAD.fullmatch(head)
    if found is None:
        raise Damaged(f"object {name} is no object of a registry. {_RESTORE}")
    if int(found[1]) > FORMAT:
        raise Damaged(newer_format(f"object {name}", int(found[1]), FORMAT))
    digest = hashlib.sha256(body).hexdigest()
    if digest.encode() != found[2]:
        raise Damaged(f"object {name} was altered: its hash does not match. {_RESTORE}")
    return digest, body
