"""Where each stream lives now. The pipe file says it (`on`); a migration changes it while the fleet runs.

A migration writes a record into `penstock.control` for each step, and every process of the fleet follows that topic. So the
steps survive the machine of the operator: whoever runs the command again goes on. Each record names the one that it continues
(`of`). It is void when another came first. So the order in the topic decides between a migration, one that was frozen, and
writers that waited long enough.

| state | writers | readers | begins when |
|---|---|---|---|
| none | the home | the home | |
| copying | the home | the home | the topic is there on the other broker |
| held | wait | the home | the copy is nearly complete |
| written | the other broker | leave, and wait | the copy is complete, and was compared |
| none again | the other broker | the other broker | no member reads at the former home, and the positions are copied |

**Writers** know a state for LEASE_S after they have read the topic. An append that ends later, or in another state, is in doubt:
it is repeated where the stream lives then. So a migration that waits for LEASE_S behind `held` misses no acknowledged event, also
when a writer was frozen. Writers that are held for HOLD_S write `released`, and continue at the home: a migration that died holds
nothing up.

**Offsets stay the same** where they count records. `bases`: what is added to the offsets on a broker, by partition. The copy of a
record has the offset of the record, so the positions of groups, the ledger and the places of records stay valid.

To and from Kinesis that is not possible. There the bases are such that offsets increase: no offset of a stream ever names two
events. The positions of groups are translated.
"""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec
import structlog

from services.core import metrics
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError, OutcomeUnknown, Unavailable, UnknownTopic
from services.core.broker.record import Record
from services.core.broker.several.brokers import DEFAULT, Grant, Places
from services.core.clock import boot_seconds
from services.core.control.topic import ControlTopic
from services.core.pipe_file.topic_names import CONTROL

log = structlog.get_logger()

LEASE_S = 1.0
HOLD_S = 3.0
"""Unless the record `held` says more: a shard of Kinesis may be read five times a second."""
ANY_PARTITION = -1
"""In bases: all that have none of their own. Shards get new numbers when they are split."""
FOLLOW_S = 0.2
"""Seconds between two reads of the topic."""
_VERSION = 1
_APPEND_S = 2.0

State = Literal["copying", "held", "released", "written", "moved", "undone", "finished"]


class MigrationStep(msgspec.Struct, frozen=True):
    """One record. Each state has fields of its own:

    - all: to, the other broker. of: the offset of the record before it, -1 for the first. by: the user. at: ms since the epoch.
      version: of this format.
    - `copying`: home, the broker that the stream moves from. copy, the incarnation of the topic on the other one. bases of that
      topic, if it has the offsets of the stream; if not, starts: where the stream began.
    - `held`: hold, for how many seconds.
    - `written`: ends of the stream. If the copy has other offsets: its bases; copy_ends, by its own offsets; and pairs of an
      offset of the stream and the one of the copy from which on the same records follow, ascending.
    """

    state: State
    to: str = ""
    of: int = -1
    by: str = ""
    at: int = 0
    home: str = ""
    bases: Mapping[int, int] = {}
    ends: Mapping[int, int] = {}
    copy: str = ""
    starts: Mapping[int, int] = {}
    hold: float = 0.0
    copy_ends: Mapping[int, int] = msgspec.field(name="there", default_factory=dict)
    pairs: Mapping[int, Sequence[tuple[int, int]]] = msgspec.field(name="marks", default_factory=dict)
    version: int = _VERSION


def base_of(bases: Mapping[int, int], partition: int) -> int:
    """What is added to the offsets of this partition. bases: of the stream on one broker."""
    return bases.get(partition, bases.get(ANY_PARTITION, 0))


class Home(msgspec.Struct, frozen=True):
    """Of one stream. readers, writers: names of brokers. state: of the migration, None without one. to: where it goes.

    former: the broker that has its former topic, until the migration is finished. epoch: the offset of the last record that
    counts. copy: the incarnation of the topic that a migration has made. undone: the broker that may still have it, when the
    migration was given up.
    """

    readers: str
    writers: str
    epoch: int = -1
    state: State | None = None
    to: str = ""
    former: str = ""
    bases: Mapping[str, Mapping[int, int]] = {}
    ends: Mapping[int, int] = {}
    """Where the former topic ended when the stream was handed over."""
    copy: str = ""
    undone: str = ""
    starts: Mapping[int, int] = {}
    """Where the stream began when it was copied to other offsets."""
    copy_ends: Mapping[int, int] = {}
    """The end of such a copy, by the offsets of its broker."""
    pairs: Mapping[int, Sequence[tuple[int, int]]] = {}
    """Pairs in such a copy, ascending."""
    hold: float = 0.0

    def after(self, offset: int, step: MigrationStep) -> "Home | None":
        """The home when this record counts; None when it is void."""
        if step.of != self.epoch:
            return None
        new = msgspec.structs.replace(self, epoch=offset)
        match (self.state, step.state):
            case (None, "copying") if self.epoch < 0 and step.home and step.to:  # whatever the pipe file says now
                new = Home(step.home, step.home, offset, bases={step.to: step.bases})
                return msgspec.structs.replace(new, state="copying", to=step.to, copy=step.copy, starts=step.starts)
            case (None, "copying") if step.to != self.readers and self.former in ("", step.to):
                bases = dict(self.bases) | {step.to: step.bases}
                new = msgspec.structs.replace(new, state="copying", to=step.to, bases=bases, copy=step.copy)
                # A former topic there, or the copy of a migration that was given up, was deleted before this record.
                new = msgspec.structs.replace(new, starts=step.starts, copy_ends={}, pairs={})
                return msgspec.structs.replace(new, former="", ends={}, undone="")
            case ("copying", "held"):
                return msgspec.structs.replace(new, state="held", hold=step.hold)
            case ("held", "released"):
                return msgspec.structs.replace(new, state="copying")
            case ("held", "written"):
                bases = dict(self.bases) | ({self.to: step.bases} if step.copy_ends else {})
                new = msgspec.structs.replace(new, state="written", writers=self.to, ends=step.ends)
                return msgspec.structs.replace(new, bases=bases, copy_ends=step.copy_ends, pairs=step.pairs)
            case ("written", "moved"):
                return msgspec.structs.replace(new, state=None, readers=self.to, to="", former=self.readers)
            case ("copying", "undone"):
                return msgspec.structs.replace(new, state=None, to="", undone=self.to)
            case (None, "finished") if self.former:
                return msgspec.structs.replace(new, former="")
        return None


class Homes(Places):
    """The homes, as far as the control topic was read. `refresh` before the first use, `follow` from then on."""

    def __init__(self, streams: Mapping[str, str], broker: Broker, targets: Mapping[str, str] | None = None) -> None:
        """streams: the broker of each by the pipe file. broker: the fleet's own. targets: as in Places; they never move."""
        super().__init__(streams, targets)
        self._broker, self._topic = broker, ControlTopic(broker.reader, "home")
        self._homes = {name: Home(on, on) for name, on in streams.items()}
        self._known_until = float("-inf")
        self._ended: dict[tuple[str, int], float] = {}
        """Until when a former epoch of a stream was known to be in force."""
        self._held_since: dict[str, float] = {}
        self._read = asyncio.Event()

    def home(self, stream: str) -> Home:
        return self._homes[stream]

    def of(self, topic: str) -> str:
        home = self._homes.get(topic)
        return super().of(topic) if home is None else home.readers

    def written_to(self, topic: str) -> str:
        home = self._homes.get(topic)
        return super().written_to(topic) if home is None else home.writers

    def moves_to(self, topic: str) -> str | None:
        home = self._homes.get(topic)
        return home.to if home is not None and home.state in ("copying", "held") else None

    def with_streams(self) -> set[str]:
        return {DEFAULT} | {name for home in self._homes.values() for name in (home.readers, home.writers)}

    @property
    def has_moves(self) -> bool:
        """Whether any stream was ever moved."""
        return any(home.epoch >= 0 for home in self._homes.values())

    def on(self, names: Collection[str]) -> list[tuple[str, str]]:
        """The streams that live, or are written, on one of these brokers, and which."""
        return [
            (stream, one) for stream, home in self._homes.items() for one in {home.readers, home.writers} & set(names)
        ]

    def base(self, name: str, topic: str, partition: int) -> int:
        home = self._homes.get(topic)
        return 0 if home is None else base_of(home.bases.get(name, {}), partition)

    async def refresh(self) -> None:
        """Read the topic to its end. Raises BrokerError kinds."""
        began = boot_seconds()
        try:
            async for offset, stream, record in self._topic.read_new():
                self._apply(offset, stream, record)
        except UnknownTopic:
            pass  # before the first `penstock apply`
        self._known_until = began + LEASE_S
        event, self._read = self._read, asyncio.Event()
        event.set()

    async def follow(self) -> None:
        """Refresh until it is cancelled. After `LEASE_S` without a refresh nobody writes or reads: a stream may have moved."""
        is_failing = False
        while True:
            try:
                await self.refresh()
                is_failing = False
            except Exception as error:  # if this task ended in silence, all streams would stand still
                if not is_failing:
                    expected = isinstance(error, BrokerError)
                    log.warning(
                        "homes_unreadable",
                        topic=CONTROL,
                        error=str(error) if expected else repr(error),
                        hint="the topic is read again",
                        exc_info=not expected,
                    )
                is_failing = True
            await asyncio.sleep(FOLLOW_S)

    def _apply(self, offset: int, stream: str, record: Record) -> None:
        home = self._homes.get(stream)
        step = None if home is None else self._topic.parse(MigrationStep, offset, record, _VERSION)
        if home is None or step is None or (new := home.after(offset, step)) is None:
            return
        self._ended[stream, home.epoch] = self._known_until
        self._homes[stream] = new
        if new.state == "held":
            self._held_since[stream] = boot_seconds()
        if self._known_until > 0:  # not what was before this process began
            metrics.BROKER_HOME_CHANGES.labels(stream, step.state).inc()
            log.info(
                "stream_home", stream=stream, state=new.state or "settled", readers=new.readers, writers=new.writers
            )

    async def write_to(self, topic: str, timeout: float) -> Grant:
        if topic not in self._homes:
            return await super().write_to(topic, timeout)
        deadline = boot_seconds() + timeout
        while True:
            home = self._homes[topic]
            if home.state != "held" and boot_seconds() <= self._known_until:
                return Grant(home.writers, home.epoch)
            if home.state == "held" and boot_seconds() > self._held_since[topic] + (home.hold or HOLD_S):
                try:
                    await self.record(topic, MigrationStep("released", by="a writer"))
                except BrokerError as error:
                    raise Unavailable(
                        f"{topic} is held for a migration, and the hold cannot be ended: {error}"
                    ) from error
                continue
            await self._wait_for_read(deadline, topic)

    async def confirm(self, topic: str, grant: Grant, timeout: float) -> None:
        if topic not in self._homes:
            return
        ended = boot_seconds()
        while ended > (until := self._granted_until(topic, grant.epoch)):
            if self._homes[topic].epoch != grant.epoch:
                raise OutcomeUnknown(
                    f"{topic} was moved during an append, which ended {ended - until:.1f} s after this process last knew the home"
                )
            try:
                await self._wait_for_read(ended + timeout, topic)
            except Unavailable as error:
                raise OutcomeUnknown(str(error)) from error

    def _granted_until(self, topic: str, epoch: int) -> float:
        return self._known_until if self._homes[topic].epoch == epoch else self._ended[topic, epoch]

    async def known(self, topic: str, timeout: float) -> None:
        if topic not in self._homes:
            return
        deadline = boot_seconds() + timeout
        while boot_seconds() > self._known_until:
            await self._wait_for_read(deadline, topic)

    def is_leaving(self, topic: str) -> bool:
        return topic in self._homes and self._homes[topic].state == "written"

    async def _wait_for_read(self, deadline: float, topic: str) -> None:
        """Until the topic was read again. Raises Unavailable."""
        try:
            async with asyncio.timeout(max(0.0, min(deadline - boot_seconds(), HOLD_S))):
                await self._read.wait()
        except TimeoutError:
            if boot_seconds() < deadline:
                return
            home = self._homes[topic]
            why = f"the stream is moved to {home.to}" if home.state == "held" else f"{CONTROL} cannot be read"
            raise Unavailable(f"{topic}: nothing is stored now: {why}") from None

    async def record(self, stream: str, step: MigrationStep, home: Home | None = None) -> bool:
        """Write the next step durably, and read it. Gives whether it counts. Raises BrokerError kinds.

        step: without `of`, `at` and `home`, and without `to` where it stays the same. home: the one that the step continues;
        absent: the newest that is known. A long step gives the home with which it began. If somebody else has taken a step
        since, this step is void.
        """
        home = self._homes[stream] if home is None else home
        left = home.readers if step.state == "copying" else ""
        now = time.time_ns() // 1_000_000
        step = msgspec.structs.replace(step, to=step.to or home.to, of=home.epoch, at=now, home=left)
        record = Record(f"home:{stream}".encode(), msgspec.json.encode(step), now)
        stored = await self._broker.appender.append(CONTROL, 0, [record], timeout=_APPEND_S)
        for _, error in stored.failed:
            raise error
        await self.refresh()
        return self._homes[stream].epoch == stored.last
