"""The log of the registry: entries in create-only objects, one behind the other, shared by all registries of a store.

Entry n is created only by a process that has applied all entries before it, and only one process can create it. So ids and
versions that an entry claims are claimed once, in one order, without a gap. An entry is one object: it happens whole or not at
all, whatever crashes. Who loses the race for a number reads the winner's entry and decides again.

A segment (`entries.SEGMENT`) repeats entries in one object. It makes a start quick, and is a second copy of each entry.
"""

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Sequence

import structlog

from services.core import metrics
from services.core.backoff import Backoff
from services.core.process.lifecycle import wait_for_stop
from services.registry.entries import (
    SEGMENT,
    Change,
    Damaged,
    Entry,
    Stored,
    entry_name,
    make_segment,
    missing,
    read_entry,
    read_segment,
    segment_name,
    store_entry,
)
from services.registry.objects import NotStored, Objects, StoreUnavailable, Watched

log = structlog.get_logger()

WITHIN_S = 15.0
"""The time limit for an append, repeats included."""
VERIFY_EVERY_S = 3600.0
MEND_EVERY_S = 5.0
_WINDOW = 256
_SEGMENTS_AT_ONCE = 16
_MOST_MISSING = 10_000
"""More objects than these can miss before another one: then it is that one which does not belong here."""
_DIGITS = re.compile("[0-9]{12}")
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 2.0


class ObjectLog:
    """The log, as this process knows it. apply: called with every entry, in order, once. begin: called before all entries are
    applied again, after damage was mended.

    number: of the last applied entry. damage: by object, why it is not usable; then nothing is appended, and what this process
    knows may be incomplete (`incomplete`).
    """

    def __init__(self, objects: Objects, begin: Callable[[], None], apply: Callable[[Entry], None]) -> None:
        self._objects, self._begin, self._apply = Watched(objects), begin, apply
        self.damage: dict[str, str] = {}
        self.incomplete = False
        self.on_reload: Callable[[], None] = lambda: None
        self.writing = asyncio.Lock()
        """Held by the caller of `append` from its decision until the append."""
        self._reading = asyncio.Lock()
        self._skipped: set[int] = set()
        self._links: set[int] = set()
        """Entries whose next one was made behind another entry: one of the two was replaced."""
        self._pending: asyncio.Task[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self.number, self._hash = 0, ""
        self._hashes: list[str] = []
        self._tail: list[Stored] = []

    @property
    def url(self) -> str:
        """Of the store."""
        return self._objects.url

    async def load(self) -> None:
        """Read everything, segments first. Damage is kept in `damage`, not raised. Raises StoreUnavailable."""
        async with self._reading:
            self.incomplete = True
            self._begin()
            self._reset()
            self.damage, skipped = {}, self._skipped
            skipped.clear()
            self._links.clear()
            await self._read_segments()
            while behind := await self._numbers_after(entry_name(self.number)):
                near = [number for number in behind if number <= self.number + len(behind) + _MOST_MISSING]
                for number in behind[len(near) :]:
                    self._record_damage(entry_name(number), _far(entry_name(number), self.number))
                if not near:
                    break
                await self._read_to(near[-1])
            self.incomplete = bool(skipped)
            self._show_damage()

    async def refresh(self) -> None:
        """Apply what others appended before this call. Concurrent calls share a request. Raises StoreUnavailable, and Damaged
        when an entry cannot be read, so that what this process knows is incomplete."""
        if self._pending is None:
            self._pending = asyncio.create_task(self._refresh(), name="refresh")
            self._pending.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._pending)
        if self.incomplete:
            self.check()

    async def _refresh(self) -> None:
        async with self._reading:
            self._pending = None  # a caller from now on may miss what is being read
            await self._read_new()

    def check(self) -> None:
        """Raises Damaged when an object is damaged."""
        for text in self.damage.values():
            raise Damaged(text)

    async def append(self, changes: Sequence[Change], by: str, after: int) -> bool:
        """Append an entry behind number `after`, on which the caller's decision rests; it is durable and applied when this
        returns True. False: there is another entry already. Call `refresh` and decide again.

        Repeats a request whose outcome is unknown with the same bytes: the object is then ours, or somebody else's, or still
        absent. Raises NotStored (it will not appear), StoreUnavailable (it may still appear) and Damaged.
        """
        self.check()
        if self.number != after:
            return False
        entry = Entry(after + 1, time.time_ns() // 1_000_000, by, secrets.token_hex(8), self._hash, tuple(changes))
        stored = store_entry(entry)
        name = entry_name(entry.number)
        won = await self._create(name, stored.content)
        metrics.REGISTRY_APPENDS.labels("stored" if won else "lost_race").inc()
        async with self._reading:
            if won and self.number == entry.number - 1:
                self._accept(stored)
            if won and entry.number % SEGMENT == 0:
                await self._write_segment()
        return won

    async def _create(self, name: str, content: bytes) -> bool:
        retry = Backoff(_FIRST_WAIT, _LONGEST_WAIT)
        end = asyncio.get_running_loop().time() + WITHIN_S
        never, in_doubt = asyncio.Event(), False
        while True:
            try:
                if await self._objects.create(name, content):
                    return True
                return (await self._objects.get([name]))[0] == content
            except StoreUnavailable as error:
                if isinstance(error, NotStored) and not in_doubt:
                    metrics.REGISTRY_APPENDS.labels("refused").inc()
                    raise
                in_doubt = True
                metrics.REGISTRY_APPENDS.labels("unknown").inc()
                retry.fail()
                if asyncio.get_running_loop().time() >= end:
                    raise StoreUnavailable(str(error)) from error
                log.warning(
                    "registry_append_unknown", object=name, error=str(error), hint="the same entry is tried again"
                )
            await retry.wait(never)

    async def run(self, stopping: asyncio.Event) -> None:
        """Verify every stored object once in a while, load again when damage was mended, and ask the store whether anybody else
        does or not, so that the metric shows when it answers again. Until `stopping`."""
        next_check = time.monotonic() + VERIFY_EVERY_S
        while not stopping.is_set():
            await wait_for_stop(stopping, MEND_EVERY_S)
            if stopping.is_set():
                return
            try:
                if self.damage or self.incomplete:  # the latter alone: the store went away while it was read again
                    await self._mend()
                elif time.monotonic() >= next_check:
                    await self.verify()
                    next_check = time.monotonic() + VERIFY_EVERY_S
                else:
                    await self.refresh()
            except Damaged:
                continue  # it is in `damage` now
            except StoreUnavailable as error:
                log.warning("registry_store_unavailable", error=str(error), hint="the store is asked again")

    async def verify(self) -> None:
        """Read every stored entry again and compare it with what was applied. Sets `damage`. Raises StoreUnavailable."""
        for first in range(1, self.number + 1, _WINDOW):
            numbers = range(first, min(first + _WINDOW, self.number + 1))
            found = await self._objects.get([entry_name(number) for number in numbers])
            for number, content in zip(numbers, found, strict=True):
                reason = self._compare(number, content)
                if reason is not None:
                    self._record_damage(entry_name(number), reason)
        self._show_damage()

    def _compare(self, number: int, content: bytes | None) -> str | None:
        name = entry_name(number)
        if content is None:
            return str(missing(name))
        try:
            stored = read_entry(name, number, content)
        except Damaged as error:
            return str(error)
        known = self._hashes[number - 1]
        return None if known in ("", stored.hash) else _replaced(number)

    async def _mend(self) -> None:
        """Look at the damaged objects again. When all are whole, apply everything again."""
        names = list(self.damage)
        for name in names:
            reason = await self._why_damaged(name)
            if reason is not None:
                self.damage[name] = reason
                return
        log.info("registry_mended", objects=names)
        await self.load()
        self.on_reload()

    async def _why_damaged(self, name: str) -> str | None:
        """Why this object is still damaged."""
        folder, _, digits = name.partition("/")
        number = int(digits)
        [content] = await self._objects.get([name])
        if number * (1 if folder == "log" else SEGMENT) > self.number:
            return None if content is None else self.damage[name]
        if folder != "log":
            return _compare_segment(number, content)
        if number not in self._links:
            return self._compare(number, content)
        [following] = await self._objects.get([entry_name(number + 1)])
        return _compare_link(number, content, following)

    async def _read_segments(self) -> None:
        numbers = await self._numbers_after("segments/")
        for first in range(0, len(numbers), _SEGMENTS_AT_ONCE):
            some = numbers[first : first + _SEGMENTS_AT_ONCE]
            found = await self._objects.get([segment_name(number) for number in some])
            for number, content in zip(some, found, strict=True):
                if number * SEGMENT > self.number + _MOST_MISSING:
                    self._record_damage(segment_name(number), _far(segment_name(number), self.number))
                    return
                await self._read_segment(number, content or b"")

    async def _numbers_after(self, name: str) -> list[int]:
        """The numbers of the objects behind this one, in order. What has another name is not ours."""
        parts = [found.rpartition("/")[2] for found in await self._objects.names_after(name)]
        return [int(part) for part in parts if _DIGITS.fullmatch(part)]

    async def _read_segment(self, number: int, content: bytes) -> None:
        await self._read_to(number * SEGMENT)
        try:
            entries = read_segment(number, content)
        except Damaged as error:
            self._record_damage(segment_name(number), str(error))
            await self._read_to((number + 1) * SEGMENT)
            return
        for stored in entries:
            self._accept(stored)

    async def _read_to(self, last: int) -> None:
        """Apply all entries up to this one, which must exist."""
        while self.number < last:
            numbers = range(self.number + 1, min(self.number + _WINDOW, last) + 1)
            found = await self._objects.get([entry_name(number) for number in numbers])
            for number, content in zip(numbers, found, strict=True):
                await self._read_one(number, content)

    async def _read_new(self) -> None:
        """Apply the entries that others have appended: mostly none, so it asks for one at first."""
        window = 1
        while True:
            numbers = range(self.number + 1, self.number + 1 + window)
            found = await self._objects.get([entry_name(number) for number in numbers])
            for number, content in zip(numbers, found, strict=True):
                if content is None:
                    return
                await self._read_one(number, content)
            window = min(_WINDOW, window * 8)

    async def _read_one(self, number: int, content: bytes | None) -> None:
        name = entry_name(number)
        try:
            if content is None:
                raise missing(name)
            stored = read_entry(name, number, content)
        except Damaged as error:
            self._skip(number, str(error))
            return
        self._accept(stored)
        if number % SEGMENT == 0:
            await self._write_segment()

    def _accept(self, stored: Stored) -> None:
        entry = stored.entry
        if self._hash and entry.previous != self._hash:
            self._links.add(entry.number - 1)
            self._record_damage(entry_name(entry.number - 1), _replaced(entry.number - 1))
        if entry.number % SEGMENT == 1:
            self._tail = []
        self._apply(entry)
        self.number, self._hash = entry.number, stored.hash
        self._hashes.append(stored.hash)
        self._tail.append(stored)

    def _skip(self, number: int, reason: str) -> None:
        """Go on behind an entry that cannot be read: schemas in later ones can still be read by id."""
        self._record_damage(entry_name(number), reason)
        self._skipped.add(number)
        self.incomplete = True
        self.number, self._hash = number, ""
        self._hashes.append("")
        self._tail.clear()

    def _record_damage(self, name: str, reason: str) -> None:
        if name not in self.damage:
            log.error("registry_object_damaged", object=name, reason=reason)
        self.damage[name] = reason
        self._show_damage()

    def _show_damage(self) -> None:
        metrics.REGISTRY_DAMAGED.set(len(self.damage))

    async def _write_segment(self) -> None:
        """A copy that the next start makes when this one fails."""
        whole, self._tail = self._tail, []
        if len(whole) < SEGMENT:
            return
        try:
            await self._objects.create(segment_name(whole[-1].entry.number // SEGMENT - 1), make_segment(whole))
        except StoreUnavailable as error:
            log.warning("registry_segment_not_written", error=str(error), hint="the next start writes it")


def _far(name: str, last: int) -> str:
    return f"more than {_MOST_MISSING:,} entries are missing between {last} and object {name}. Try: remove it, if it is not ours"


def _replaced(number: int) -> str:
    return f"object {entry_name(number)} was replaced by another one. Try: restore it from a backup"


def _compare_link(number: int, content: bytes | None, following: bytes | None) -> str | None:
    """As long as the next entry was made behind another one, nobody knows which of the two is wrong."""
    names = entry_name(number), entry_name(number + 1)
    if content is None or following is None:
        return str(missing(names[0] if content is None else names[1]))
    try:
        first, second = read_entry(names[0], number, content), read_entry(names[1], number + 1, following)
    except Damaged as error:
        return str(error)
    return None if second.entry.previous == first.hash else _replaced(number)


def _compare_segment(number: int, content: bytes | None) -> str | None:
    try:
        read_segment(number, content or b"")
    except Damaged as error:
        return str(error)
    return None
