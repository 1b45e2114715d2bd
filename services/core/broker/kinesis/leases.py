"""Who reads which shard of a group: what stands in the lease table, and what a member does about it. Pure: no I/O.

The words, once. A **lease** is one row: one shard of one stream, for one group. Its **owner** is who reads it. Who wants
one that another reads puts itself in as the owner and the other as **draining**; the other finishes what is in flight and
takes itself out. The **holder** is the one that may commit: who drains, else the owner. The holder writes the row again
and again, so its **counter** grows; a counter that stands still for the lease time tells that the holder is dead.
Every write is made on the condition that the counter is still the one that was read: whoever lost a lease cannot write.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple
from zlib import crc32

from services.core.broker.kinesis.shards import Shard, shard_id


class Begin(NamedTuple):
    """Where a shard is read from while nothing is committed.

    oldest: its beginning. arrival: what arrived at `value` (ms) or later. date: the first record whose own time is not
    before `value` (ms), not looked for yet. offset: at `value`, or behind it.
    """

    kind: Literal["oldest", "arrival", "date", "offset"]
    value: int = 0


OLDEST = Begin("oldest")


class Lease(NamedTuple):
    """One row. stream: names one life of a stream. committed: last processed offset. is_done: all of it is processed.

    arrived: about when the committed record arrived (ms), not later than it did. settled: when nothing unprocessed was
    left behind (ms); at first when the row was made. What arrived since then is lost once it is older than the retention.
    retention: the shortest (ms) that was seen since then; 0: none. open: when the shard was last seen open (ms); what its
    children hold arrived later. switches: changes of the owner since the last commit.
    """

    stream: str
    shard: int
    parents: tuple[int, ...] = ()
    begin: Begin = OLDEST
    owner: str | None = None
    draining: str | None = None
    counter: int = 0
    committed: int | None = None
    is_done: bool = False
    arrived: int = 0
    settled: int = 0
    switches: int = 0
    retention: int = 0
    open: int = 0

    @property
    def key(self) -> str:
        """Names the row, as a KCL application of several streams does."""
        return f"{self.stream}:{shard_id(self.shard)}"

    @property
    def holder(self) -> str | None:
        """Who may commit."""
        return self.draining or self.owner

    def progressed(self, settled: int, retention: int, open_ms: int) -> "Lease":
        """The row with what its holder saw since it was written; see the fields."""
        least = retention if settled > self.settled else min(self.retention or retention, retention)
        return self._replace(settled=max(self.settled, settled), retention=least, open=max(self.open, open_ms))

    def taken_by(self, member: str) -> "Lease":
        """The row after `member` takes it at once: nobody holds it."""
        switches = self.switches + (self.owner not in (None, member))
        return self._replace(owner=member, draining=None, switches=switches)

    def asked_by(self, member: str) -> "Lease":
        """The row after `member` asks its holder for it."""
        return self._replace(owner=member, draining=self.holder, switches=self.switches + 1)

    def left_by(self, member: str) -> "Lease":
        """The row after `member` lets go; who asked for it has it."""
        owner = None if self.owner == member else self.owner
        return self._replace(owner=owner, draining=None if self.draining == member else self.draining)


class Watch:
    """How long each counter has stood still, as seen by one member. Seconds, by the clock that `look` is given."""

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self, rows: Collection[Lease], now: float) -> frozenset[str]:
        """Keys of the rows that nobody holds: without a holder, or the holder wrote nothing for the lease time."""
        seen = {row.key: (row.counter, now) for row in rows}
        for key, (counter, since) in self._seen.items():
            if key in seen and seen[key][0] == counter:
                seen[key] = (counter, since)
        self._seen = seen
        return frozenset(row.key for row in rows if row.holder is None or now - seen[row.key][1] >= self._lease)


class Claims(NamedTuple):
    """What a member should write: `take` rows that are free, `ask` for rows of the one that has most."""

    take: list[Lease]
    ask: list[Lease]


_MOST_ASKED = 5


def plan(rows: Iterable[Lease], free: Collection[str], member: str) -> Claims:
    """A fair share for `member`: free rows up to it; none free, then some of the one that has most, if two or more apart.

    Of shards whose parents are done; an operator may have moved the group back to a parent.
    At most a quarter of the difference a round, so that members that come at the same time do not ask for too much.
    """
    every = {(row.stream, row.shard): row for row in rows}
    todo = [
        row
        for row in every.values()
        if not row.is_done and all(every[row.stream, p].is_done for p in row.parents if (row.stream, p) in every)
    ]
    loads = Counter(row.owner for row in todo if row.owner and row.key not in free)
    mine = loads.pop(member, 0)
    share = -(-len(todo) // (len(loads) + 1))
    # an order of its own for each member: two seldom want the same one
    todo.sort(key=lambda row: crc32(f"{member}/{row.key}".encode()))
    take = [row for row in todo if row.key in free][: max(0, share - mine)]
    if take or not loads:
        return Claims(take, [])
    richest, most = max(loads.items(), key=lambda item: (item[1], item[0] or ""))
    if most - mine < 2:
        return Claims([], [])
    theirs = [row for row in todo if row.owner == richest and row.draining is None and row.key not in free]
    return Claims([], theirs[: min(_MOST_ASKED, max(1, (most - mine) // 4))])


def new_rows(
    stream: str, shards: Collection[Shard], rows: Collection[Lease], begin: Begin, now_ms: int, begun_ms: int
) -> list[Lease]:
    """Rows to add for one stream: for shards without parents at first, for others once their parents are done.

    begin: for a group that begins, and misses nothing that arrived before `begun_ms`; one that has begun goes on as it did.
    A child is read from its beginning, or as its parents were if there was nothing for the group in them. What it holds
    arrived after its parents' last record, and after they were seen open.
    """
    known = {row.shard: row for row in rows}
    listed = {shard.number for shard in shards}
    roots = [row for row in rows if not row.parents]
    if roots:
        begin = min((row.begin for row in roots if row.begin.kind != "offset"), default=begin, key=lambda b: b.value)
    elif rows:
        begin = OLDEST  # where it began is forgotten: nothing that it has not read may be passed over
    added = []
    for shard in shards:
        parents = tuple(number for number in shard.parents if number in listed or number in known)
        if shard.number in known or any(number not in known or not known[number].is_done for number in parents):
            continue
        before = [known[number] for number in parents]
        # Of a shard whose parents came and went unseen: what arrived since the group last saw the stream.
        settled = max((_open_until(row) for row in before or rows), default=begun_ms)
        seen_open = now_ms if shard.is_open else 0
        added.append(Lease(stream, shard.number, parents, _inherit(before, begin), settled=settled, open=seen_open))
    return added


def _open_until(row: Lease) -> int:
    return max(row.open, row.arrived) or row.settled


def old_rows(shards: Collection[Shard], rows: Collection[Lease]) -> list[Lease]:
    """Rows of one stream that nobody needs: done, their shard aged out, and all its children have rows of their own."""
    known = {row.shard for row in rows}
    waiting = {parent for shard in shards if shard.number not in known for parent in shard.parents}
    kept = waiting | {shard.number for shard in shards}
    return [row for row in rows if row.is_done and row.shard not in kept]


def _inherit(parents: Collection[Lease], begin: Begin) -> Begin:
    if not parents:
        return begin
    begins = {row.begin for row in parents}
    if len(begins) == 1 and all(row.committed is None for row in parents):
        (same,) = begins
        return OLDEST if same.kind == "offset" else same
    return OLDEST


def by_stream(rows: Mapping[str, Lease], stream: str) -> list[Lease]:
    """The rows of one life of a stream."""
    return [row for row in rows.values() if row.stream == stream]
