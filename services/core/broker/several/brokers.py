"""Opens the brokers of a fleet, each when it is needed first, and says which one has a topic."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from typing import Final, NamedTuple

import structlog

from services.core.broker.contract import Broker
from services.core.broker.errors import AccessRefused, BrokerClosed, BrokerError, OffsetOutOfRange, Unavailable
from services.core.broker.record import Batch

log = structlog.get_logger()

DEFAULT: Final = "default"
"""The name of the fleet's own broker, that of `--broker`. It has every topic but streams that say otherwise."""

AGAIN_AFTER_S = 1.0
"""After a broker could not be opened, calls fail with the same error for so long."""


class Grant(NamedTuple):
    """Where a writer may write, by the state `epoch` of the stream's home."""

    broker: str
    epoch: int


class Places:
    """Which broker each stream lives on: `streams`, by name. targets: the same of the topics of others that are written, by their
    names in the fleet. All other topics are on the default broker.

    Here streams stay where they are. `services.core.control.homes` moves them.
    """

    def __init__(self, streams: Mapping[str, str], targets: Mapping[str, str] | None = None) -> None:
        self._streams, self._targets = streams, dict(targets or {})

    def of(self, topic: str) -> str:
        """The name of the broker that the topic lives on."""
        return self._streams.get(topic) or self._targets.get(topic, DEFAULT)

    def written_to(self, topic: str) -> str:
        """The name of the broker that new records of the topic go to: in the middle of a move another one."""
        return self.of(topic)

    def with_streams(self) -> set[str]:
        """The names of the brokers that have topics of the fleet. Groups are only there."""
        return {DEFAULT, *self._streams.values()}

    def moves_to(self, topic: str) -> str | None:
        """The broker to which new records of the topic may go next, because it is being moved there."""
        return None

    def base(self, name: str, topic: str, partition: int) -> int:
        """What is added to the offsets of this partition on that broker."""
        return 0

    async def write_to(self, topic: str, timeout: float) -> Grant:
        """Where to append now; waits while the topic is held. Raises Unavailable after `timeout` seconds."""
        return Grant(self.of(topic), -1)

    async def confirm(self, topic: str, grant: Grant, timeout: float) -> None:
        """Called when the append has just ended. Raises OutcomeUnknown unless the grant was valid until now."""

    async def known(self, topic: str, timeout: float) -> None:
        """Waits until it is known where the topic is. Raises Unavailable after `timeout` seconds."""

    def is_leaving(self, topic: str) -> bool:
        """Whether its readers must leave, because it moves."""
        return False


def shift_batch(batch: Batch, base: int) -> Batch:
    """The batch with its offsets `base` higher."""
    if not base:
        return batch
    damage = batch.damage and batch.damage._replace(first=batch.damage.first + base, last=batch.damage.last + base)
    return Batch(batch.topic, batch.partition, [offset + base for offset in batch.offsets], batch.records, damage)


@contextmanager
def shifted_errors(base: int) -> Iterator[None]:
    """An OffsetOutOfRange leaves the block with its offsets `base` higher. Its text keeps the broker's own."""
    try:
        yield
    except OffsetOutOfRange as error:
        error.wanted, error.start, error.end = error.wanted + base, error.start + base, error.end + base
        raise


Opening = Callable[[], AbstractAsyncContextManager[Broker]]


class Brokers:
    """The brokers by name. `default` is open; the others are opened at their first use, and again after a failure.

    So a cluster that is down holds up only the topics that live there.
    """

    def __init__(
        self, default: Broker, openings: Mapping[str, Opening], places: Places, noncontiguous: Collection[str] = ()
    ) -> None:
        """noncontiguous: the names of the brokers whose offsets are not contiguous. They are known before they are opened."""
        self.places, self.noncontiguous = places, frozenset(noncontiguous)
        self.names = (DEFAULT, *openings)
        self._openings = openings
        self._open: dict[str, Broker] = {DEFAULT: default}
        self._locks = {name: asyncio.Lock() for name in openings}
        self._failed: dict[str, tuple[float, BrokerError]] = {}
        self._preparing: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._closing = AsyncExitStack()
        self._is_closed = False

    async def of(self, topic: str) -> Broker:
        """The broker that the topic lives on. Raises BrokerError kinds when it cannot be opened."""
        return await self.named(self.places.of(topic))

    async def named(self, name: str) -> Broker:
        """Raises BrokerError kinds when it cannot be opened."""
        found = self._open.get(name)
        if found is not None:
            return found
        if name not in self._locks:
            raise Unavailable(
                f"a stream lives on broker {name}, which the pipe file lacks. Try: brokers: {{{name}: URL}} in it"
            )
        async with self._locks[name]:
            return self._open.get(name) or await self._open_now(name)

    async def _open_now(self, name: str) -> Broker:
        if self._is_closed:
            raise BrokerClosed("the broker was closed")
        failed = self._failed.get(name)
        if failed is not None and time.monotonic() < failed[0]:
            raise _kind(failed[1])(str(failed[1])) from failed[1]
        try:
            opened = await self._closing.enter_async_context(self._openings[name]())
        except BrokerError as error:
            error = _named(error, name)
            self._failed[name] = (time.monotonic() + AGAIN_AFTER_S, error)
            raise error from error.__cause__
        self._open[name] = opened
        return opened

    def prepare_move(self, topic: str) -> None:
        """If the topic is being moved, open the broker to which it goes, and find the topic there, in the background. At the
        hand-over writers are held. Without this they would wait for it, too: to open Kinesis takes a second or more."""
        to = self.places.moves_to(topic)
        if to is not None and (to, topic) not in self._preparing and not self._is_closed:
            self._preparing[to, topic] = asyncio.create_task(self._prepare(to, topic), name=f"prepare {topic} on {to}")

    async def _prepare(self, name: str, topic: str) -> None:
        """Again each second while the topic is moved there: a copy takes hours, and what is known of the topic gets old. Raises
        nothing: nobody waits for it, and it is to go on."""
        is_failing = False
        while self.places.moves_to(topic) == name:
            try:
                await (await self.named(name)).appender.partition_count(topic)
                is_failing = False
            except Exception as error:  # also one that nobody expects
                if not is_failing:
                    hint = (
                        "after the hand-over, no event could be stored there. Try: mend the cause, or penstock migrate "
                        "STREAM --undo"
                    )
                    text = str(error) if isinstance(error, BrokerError) else repr(error)
                    log.warning("move_not_prepared", stream=topic, broker=name, error=text, hint=hint)
                is_failing = True
            await asyncio.sleep(AGAIN_AFTER_S)
        del self._preparing[name, topic]

    async def with_streams(self) -> dict[str, Broker]:
        """Those of `Places.with_streams`, by name. Raises BrokerError kinds when one cannot be opened."""
        there = self.places.with_streams()
        return {name: await self.named(name) for name in self.names if name in there}

    def opened(self) -> Iterable[Broker]:
        """Those that are open now; the default broker is first."""
        return tuple(self._open.values())

    def by_broker(self, topics: Collection[str]) -> dict[str, list[str]]:
        """The topics by the name of the broker that they live on."""
        found: dict[str, list[str]] = {}
        for topic in topics:
            found.setdefault(self.places.of(topic), []).append(topic)
        return found

    async def close(self) -> None:
        """Close all but the default broker, which its opener closes."""
        self._is_closed = True
        for task in self._preparing.values():
            task.cancel()
        await asyncio.gather(*self._preparing.values(), return_exceptions=True)
        await self._closing.aclose()


def _named(error: BrokerError, name: str) -> BrokerError:
    """A failure to open is of the same kind where waiting helps; others keep their type and their text."""
    return _kind(error)(f"broker {name} of the pipe file: {error}") if error.retriable else error


def _kind(error: BrokerError) -> type[BrokerError]:
    """Whoever is not accepted must not be told that waiting helps."""
    return type(error) if isinstance(error, AccessRefused) else Unavailable
