"""Stores snapshots in the topic `penstock.observer`: the parts that changed, then a manifest that names all parts.

A part is stored under a digest of its name and content, so an unchanged part is not written again. Parts are removed by the
topic's retention only. So the oldest ones are written again while the topic keeps them, and when too many records of earlier
snapshots are between them and the end. A restart reads from the oldest part of the newest complete manifest.

The manifest is durable after all of its parts. A crash at any record leaves the snapshot before it.
"""

import asyncio
import ctypes
import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec
import structlog
import zstandard

from services.core import metrics
from services.core.broker.contract import PartitionRange, Reader
from services.core.broker.producer import Producer
from services.core.broker.reading import scan
from services.core.broker.record import Headers, Record
from services.core.ledger.report import SNAPSHOTS, PackedOffset, pack_offset
from services.core.version import newer_format
from services.observer.ledger.table import Table
from services.observer.snapshot import FollowerState, Loader, NamedPart
from services.observer.snapshot_v1 import JoinedParts, restore_v1

log = structlog.get_logger()

VERSION = 2
"""Of manifest and parts. Fields that are added have a default and need no new version."""
RECORD_BYTES = 512 * 1024
PIECE_BYTES = RECORD_BYTES // 2
_ID_BYTES = 12
_RECENT = timedelta(minutes=30)
REWRITE_AFTER_MS = 6 * 3_600_000
"""Parts that were stored so long ago are written again, a REWRITE_SHARE of all bytes at a time. The topic keeps them for two
days."""
REWRITE_SHARE = 72
_MOST_GARBAGE = 2
"""The bytes that a restart reads in vain are at most so many times the bytes that it needs, and SPARE_BYTES."""
SPARE_BYTES = 16 << 20

_KEY = b"ledger"
_FORMAT, _KIND, _NAME, _NUMBER, _OF = "penstock_snapshot", "kind", "name", "number", "of"
"""Headers. Version 1 has others, so an older observer ignores these records."""
_VERSION, _PARTS, _MANIFEST = b"%d" % VERSION, b"parts", b"manifest"


class Replaced(Exception):
    """An observer that speaks since a later time has stored a snapshot: ours would not count."""


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    """Of a part that is larger than a record, or all of it. data: of the compressed part."""

    id: bytes
    number: int
    of: int
    data: bytes


class _Manifest(msgspec.Struct, frozen=True):
    """term: counts the observers that spoke; the snapshots of an earlier one that was frozen do not count. first: the offset
    from which on the parts are stored. ids: of all parts, joined."""

    version: int
    term: int
    first: PackedOffset
    ids: bytes


class _Stored(msgspec.Struct):
    """Where a part is. begin: the bytes that were stored before it, as far as we know. at_ms: when it was stored. size, pieces:
    what of it is stored."""

    offset: int
    begin: int
    at_ms: int
    size: int = 0
    pieces: int = 0


class _JoinedPieces:
    """Joins the pieces of parts. An observer that is interrupted leaves a part without its end, and stores it again."""

    def __init__(self) -> None:
        self._pieces: dict[bytes, list[bytes]] = {}

    def add(self, piece: _Piece) -> bytes | None:
        """The part, still compressed, if this is its last piece."""
        if piece.number == 0:
            self._pieces[piece.id] = []
        mine = self._pieces.get(piece.id, [])
        if len(mine) == piece.number:  # else repeated, or behind a gap
            mine.append(piece.data)
        return b"".join(self._pieces.pop(piece.id)) if len(mine) == piece.of else None


class _Candidate(NamedTuple):
    """A complete snapshot in the topic: a manifest, from the offset `first` to `offset`; or one of version 1, which is `whole`.

    It does not hold the manifest: the topic has those of two days, and of a large table they take tens of megabytes.
    """

    term: int
    offset: int
    first: int
    whole: bytes | None = None


class SnapshotLog:
    """Of one observer. `store` and `load` may be called at the same time as other methods; they wait for each other.

    now_ms: wall clock.
    """

    def __init__(self, reader: Reader, producer: Producer, now_ms: Callable[[], int]) -> None:
        self._reader, self._producer, self._now_ms = reader, producer, now_ms
        self._stored: dict[bytes, _Stored] = {}
        """The parts of the last snapshot, and those that were stored since; the oldest first."""
        self._begun: dict[bytes, _Stored] = {}
        """The parts whose last piece is not stored, perhaps because the broker was away. They are stored again."""
        self._written = 0
        self._last = -1
        """The offset of the last record that we stored."""
        self._term = 0
        self._storing = asyncio.Lock()

    def begin_term(self) -> None:
        """This observer speaks from now on: the snapshots of earlier ones do not replace ours."""
        self._term += 1

    async def store(self, make_parts: Callable[[], Iterable[NamedPart]]) -> int:
        """Store a snapshot durably; gives the bytes written. Raises Replaced, and BrokerError kinds: then the one before counts.

        make_parts: the state of this moment; it is consumed without a wait, once or twice.
        """
        async with self._storing:
            await self._check_replaced()
            before = self._written
            while not await self._store(make_parts()):
                log.warning("snapshots_gone", topic=SNAPSHOTS, hint="the topic was created again; all is stored again")
            _return_free_memory()
            return self._written - before

    async def _check_replaced(self) -> None:
        """Read what others stored since our last record. Raises Replaced, BrokerError kinds."""
        pieces = dict[bytes, dict[int, bytes]]()
        if self._last < 0:
            return
        async for batch in scan(self._reader, SNAPSHOTS, 0, self._last + 1, None):
            manifests = [_join(one, pieces) for one in batch.records if one.header(_KIND) == _MANIFEST]
            term = max((one.term for one in manifests if one is not None), default=0)
            if term > self._term:
                raise Replaced(f"another observer speaks: its term is {term}, ours {self._term}")

    async def _store(self, parts: Iterable[NamedPart]) -> bool:
        """False: the topic was created again, and earlier parts are gone."""
        now, rewritten = self._now_ms(), self._find_old()
        ids: list[bytes] = []
        pending: list[_Piece] = []
        for name, content in parts:
            part = _digest(name, content)
            ids.append(part)
            if part not in self._stored or part in rewritten:
                pending += _cut(part, _COMPRESSOR.compress(content))
        for pieces in _bundle(pending):
            value = _ENCODER.encode(pieces)
            offset = await self._append(value, _PARTS, ())
            if offset is None:
                return False
            for piece in pieces:
                self._record(piece, offset, now)
            self._written += len(value)
        first = min((self._stored[part].offset for part in ids), default=max(0, self._last))
        manifest = _Manifest(VERSION, self._term, pack_offset(first), b"".join(ids))
        data, unique = _COMPRESSOR.compress(_ENCODER.encode(manifest)), uuid.uuid4().bytes
        slices = [data[start : start + RECORD_BYTES] for start in range(0, len(data), RECORD_BYTES)]
        for number, value in enumerate(slices):
            head = ((_NAME, unique), (_NUMBER, b"%d" % number), (_OF, b"%d" % len(slices)))
            if await self._append(value, _MANIFEST, head) is None:
                return False
            self._written += len(value)
        live = set(ids)
        self._stored = {part: stored for part, stored in self._stored.items() if part in live}
        return True

    async def _append(self, value: bytes, kind: bytes, more: Headers) -> int | None:
        """The record's offset; None when the topic was created again since the last one."""
        record = Record(_KEY, value, self._now_ms(), ((_FORMAT, _VERSION), (_KIND, kind), *more))
        result = await self._producer.send_to(SNAPSHOTS, {0: [record]})
        result.raise_first()
        offset = result.parts[0].first
        if offset <= self._last:
            self._stored, self._last = {}, offset
            return None
        self._last = offset
        return offset

    def _find_old(self) -> set[bytes]:
        """The oldest parts, to be written again."""
        live = sum(stored.size for stored in self._stored.values())
        share, found, chosen = max(live // REWRITE_SHARE, RECORD_BYTES), set(), 0
        for part, stored in self._stored.items():
            behind = self._written - stored.begin
            is_far = behind > (1 + _MOST_GARBAGE) * live + SPARE_BYTES
            is_old = self._now_ms() - stored.at_ms > REWRITE_AFTER_MS and chosen < share
            if not is_far and not is_old:
                break
            found.add(part)
            chosen += stored.size
        return found

    async def load(self, make_table: Callable[[], Table]) -> tuple[Table, FollowerState] | None:
        """The table of the newest complete snapshot and the state beside it; None without one. Raises BrokerError kinds.

        make_table: an empty table; called for each snapshot that is tried.
        """
        async with self._storing:
            recent = (await self._reader.offsets_at(SNAPSHOTS, datetime.now(UTC) - _RECENT))[0]
            gone: set[bytes] = set()
            for start in (recent, None):
                for candidate in await self._find(start):
                    try:
                        manifest = None if candidate.whole is not None else await self._read_manifest(candidate)
                        if manifest is not None and not gone.isdisjoint(_ids(manifest)):
                            continue
                        table = make_table()
                        return table, await self._load(candidate, manifest, table, gone)
                    except ValueError as error:
                        log.warning("snapshot_unreadable", error=str(error), hint="the snapshot before it is read")
            self._stored, self._written, self._last = {}, 0, -1
            return None

    async def _find(self, start: int | None) -> list[_Candidate]:
        """The snapshots from this offset on, the best one first: of the latest term, then the newest."""
        found: list[_Candidate] = []
        whole, pieces = JoinedParts(), dict[bytes, dict[int, bytes]]()
        first = newest = 0
        async for batch in scan(self._reader, SNAPSHOTS, 0, start, None):
            for offset, record in zip(batch.offsets, batch.records, strict=True):
                if (snapshot := whole.add(record)) is not None:
                    found = [one for one in found if one.whole is None]  # the newest of them is enough
                    # As of the term before it: of an observer that was downgraded meanwhile.
                    found.append(_Candidate(newest, offset, offset, snapshot))
                elif record.header(_KIND) == _MANIFEST:
                    first = first if pieces else offset
                    if (manifest := _join(record, pieces)) is not None:
                        newest = max(newest, manifest.term)
                        found.append(_Candidate(manifest.term, offset, first))
        self._term = max(self._term, newest)
        return sorted(found, key=lambda one: one[:2], reverse=True)

    async def _read_manifest(self, candidate: _Candidate) -> _Manifest:
        """Raises ValueError when it is gone meanwhile."""
        pieces = dict[bytes, dict[int, bytes]]()
        stored = PartitionRange(candidate.first, candidate.offset + 1)  # to ask again takes seconds on Kinesis
        async for batch in scan(self._reader, SNAPSHOTS, 0, stored.start, stored.end, stored):
            for offset, record in zip(batch.offsets, batch.records, strict=True):
                manifest = _join(record, pieces) if record.header(_KIND) == _MANIFEST else None
                if manifest is not None and offset == candidate.offset:
                    return manifest
        raise ValueError("its list of parts is gone")

    async def _load(
        self, candidate: _Candidate, manifest: _Manifest | None, table: Table, gone: set[bytes]
    ) -> FollowerState:
        """Raises ValueError when a part is missing or unreadable; `gone` gets the missing ones."""
        self._stored, self._begun, self._written, self._last = {}, {}, 0, candidate.offset
        if manifest is None:
            return restore_v1(candidate.whole or b"", table)
        if manifest.version > VERSION:
            metrics.NOT_UNDERSTOOD.labels("snapshot", "version").inc()
            raise ValueError(newer_format("the observer's snapshot", manifest.version, VERSION))
        loader, wanted = Loader(table), set(_ids(manifest))
        missing, joined = set(wanted), _JoinedPieces()
        async for batch in scan(self._reader, SNAPSHOTS, 0, int(manifest.first), candidate.offset):
            for offset, record in zip(batch.offsets, batch.records, strict=True):
                for piece in _decode(record):
                    if piece.id not in wanted:
                        continue
                    self._record(piece, offset, record.timestamp)
                    if piece.id in missing and (part := joined.add(piece)) is not None:
                        loader.add(_decompress(part))
                        missing.remove(piece.id)
                self._written += len(record.value or b"")
            await asyncio.sleep(0)
        if missing:
            gone |= missing
            raise ValueError(f"{len(missing)} of its {len(wanted)} parts are gone or damaged")
        found = loader.finish()
        _return_free_memory()
        return found

    def _record(self, piece: _Piece, offset: int, at_ms: int) -> None:
        """Keep the place of this piece's part, once all pieces are stored: of the newest ones that are in order."""
        if piece.number == 0:
            self._begun[piece.id] = _Stored(offset, self._written, at_ms)
        begun = self._begun.get(piece.id)
        if begun is None or begun.pieces != piece.number:
            return
        begun.size += len(piece.data)
        begun.pieces += 1
        if begun.pieces == piece.of:
            self._stored.pop(piece.id, None)
            self._stored[piece.id] = self._begun.pop(piece.id)


def _return_free_memory() -> None:
    """Give the pages of freed memory back to the system: bitmaps of young minutes leave holes between those of waiting events,
    and glibc reuses few of them. Takes some ten ms. Another C library keeps them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _digest(name: str, content: bytes) -> bytes:
    found = hashlib.blake2b(b"%d:%b" % (len(name), name.encode()), digest_size=_ID_BYTES)
    found.update(content)
    return found.digest()


def _cut(part: bytes, data: bytes) -> list[_Piece]:
    starts = range(0, max(1, len(data)), PIECE_BYTES)
    return [_Piece(part, number, len(starts), data[at : at + PIECE_BYTES]) for number, at in enumerate(starts)]


def _bundle(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """In records of about RECORD_BYTES, in order."""
    bundle: list[_Piece] = []
    size = 0
    for piece in pieces:
        if bundle and size + len(piece.data) > RECORD_BYTES:
            yield bundle
            bundle, size = [], 0
        bundle.append(piece)
        size += len(piece.data) + _ID_BYTES
    if bundle:
        yield bundle


def _decode(record: Record) -> list[_Piece]:
    """The pieces in a record; none in a record of another kind or version. Raises ValueError."""
    if record.header(_KIND) != _PARTS or record.header(_FORMAT) != _VERSION or record.value is None:
        return []
    return _PIECES.decode(record.value)  # its errors are ValueErrors


def _join(record: Record, pieces: dict[bytes, dict[int, bytes]]) -> _Manifest | None:
    """The manifest, if this record completes it. A record that is none is ignored."""
    name, number, of = record.header(_NAME), record.header(_NUMBER), record.header(_OF)
    if name is None or number is None or of is None or record.value is None or not (number + of).isdigit():
        return None
    mine = pieces.setdefault(name, {})
    mine[int(number)] = record.value
    if len(mine) < int(of):
        return None
    pieces.clear()
    try:
        return _MANIFESTS.decode(_decompress(b"".join(data for _, data in sorted(mine.items()))))
    except ValueError as error:
        if record.header(_FORMAT) != _VERSION:
            metrics.NOT_UNDERSTOOD.labels("snapshot", "version").inc()
        log.warning("snapshot_unreadable", error=str(error), hint="the snapshot before it is read")
        return None


def _ids(manifest: _Manifest) -> list[bytes]:
    return [manifest.ids[at : at + _ID_BYTES] for at in range(0, len(manifest.ids), _ID_BYTES)]


def _decompress(data: bytes) -> bytes:
    """Raises ValueError."""
    try:
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


_COMPRESSOR = zstandard.ZstdCompressor(level=3)
_ENCODER = msgspec.msgpack.Encoder()
_PIECES = msgspec.msgpack.Decoder(list[_Piece])
_MANIFESTS = msgspec.msgpack.Decoder(_Manifest)
