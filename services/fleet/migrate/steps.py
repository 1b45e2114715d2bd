"""The steps of a migration: begin, copy and compare, hold the writers, hand over, move the groups. Each may be repeated."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.errors import AccessRefused, BrokerError, NotAllowed, TopicExists, UnknownTopic
from services.core.broker.several.broker import SeveralBrokers
from services.core.control import homes as timing
from services.core.control.homes import Home, Homes, MigrationStep, State
from services.core.pipe_file.pipes import PipeFile
from services.core.yaml_source import BadConfiguration
from services.fleet.migrate.copying import CopyDiffers
from services.fleet.migrate.exact_copy import ExactCopy
from services.fleet.migrate.former import FormerTopic, incarnation_of
from services.fleet.migrate.movable import LoadPipes
from services.fleet.migrate.offset_translator import OffsetTranslator
from services.fleet.migrate.positions import GroupPositions, TranslateOffset
from services.fleet.migrate.translated_copy import TranslatedCopy
from services.fleet.problem import CommandFailed

_MARGIN_S = 0.2
"""Beside the lease: clocks of two processes run a little differently."""
NEARLY_S, MOST_S = 0.4, 1.2
"""A pass over what is new that is shorter than NEARLY_S ends the copying: the writers are held for another pass while the lease
ends, and for a last one, which has nothing new unless a writer was slow. On brokers that are far away no pass may be so short. So
after each longer pass the limit grows by a tenth, up to MOST_S: two such passes are still less than HOLD_S."""
_AGAIN_S = 0.2
_PATIENCE_S, _REFUSED_S = 60.0, 10.0
"""_REFUSED_S: after a login that was refused. It is tried once more meanwhile: a token server may have restarted."""
SLOW_NEARLY_S, SLOW_MOST_S, SLOW_HOLD_S = 2.0, 4.0, 8.0
"""The same where an end is Kinesis: each read of a shard waits for a fifth of a second, and a pass has some. So writers are held
for longer."""
_MOST_VOID_TURNS = 10
"""At the hand-over: the rest took longer than the hold, each time."""
FILE_S = 3.0
"""The time for which a pipe file may be unusable during a move: somebody may be saving it."""

Show = Callable[[str, int, int], None]
"""Called with the step, and the number of events that are done, of how many."""


class Result(NamedTuple):
    """events, origins: compared. missing: origins that the copy lacked. held_s: for how long writers were held. groups: moved.
    late: events that came to the former topic after the stream was handed over, and were stored in the stream."""

    home: Home
    events: int = 0
    origins: int = 0
    missing: int = 0
    held_s: float = 0.0
    groups: int = 0
    late: int = 0

    def as_json(self, stream: str) -> dict[str, Any]:
        home = self.home
        return {
            "stream": stream,
            "home": home.readers,
            "state": home.state or "settled",
            "to": home.to or None,
            "former": home.former or None,
            "events": self.events,
            "origins": self.origins,
            "missing": self.missing,
            "held_s": round(self.held_s, 3),
            "groups": self.groups,
            "late": self.late,
        }


class Migration:
    """The migration of one stream. load: as `LoadPipes`; a copy may take hours, and the pipe file may change in this time. by:
    the user. show: the progress. before: called before each step and behind each record, for tests."""

    def __init__(
        self,
        fleet: SeveralBrokers,
        homes: Homes,
        load: LoadPipes,
        stream: str,
        by: str,
        show: Show = lambda _step, _done, _of: None,
        before: Callable[[str], None] = lambda _step: None,
    ) -> None:
        self._fleet, self._homes, self._load = fleet, homes, load
        self._stream, self._by, self._show, self._before = stream, by, show, before
        self._positions = GroupPositions(stream, self._newest_pipes, self._named)
        self._copy: ExactCopy | TranslatedCopy | None = None
        self._copy_of = ""
        self._held_s = 0.0
        self._groups = self._void_turns = 0
        self._former = FormerTopic(stream, fleet, homes, self._require)

    @property
    def home(self) -> Home:
        """The state now, as far as it was read."""
        return self._homes.home(self._stream)

    def result(self) -> Result:
        if self._copy is None:
            return Result(self.home, groups=self._groups, late=self._former.late)
        counts = self._copy.origins.counts()
        return Result(self.home, self._copy.events, *counts, self._held_s, self._groups, self._former.late)

    async def run(self, to: str) -> Result:
        """Until the stream lives on broker `to`; goes on where an earlier run ended. Raises CommandFailed, BrokerError kinds."""
        await self._patiently(self._homes.refresh)
        if self.home.state is not None and self.home.to != to:
            raise CommandFailed(
                f"{self._stream} is being moved to {self.home.to}",
                f"penstock migrate {self._stream} --to {self.home.to}, or first --undo",
            )
        if self.home.state is None:
            await self._patiently(partial(self._begin, to))
        while self.home.state is not None:
            if self.home.to != to:
                raise self._moved_meanwhile()
            await self._patiently(self._step)
        return self.result()

    async def _step(self) -> None:
        await self._homes.refresh()
        home = self.home
        match home.state:
            case "copying":
                await self._follow()
                await self._positions.check(home, await self._begins())
                await self._record("held", home, hold=SLOW_HOLD_S if self._is_translated else 0.0)
            case "held":
                await self._hand_over()
            case "written":
                await self._move_groups()
        await self._homes.refresh()

    async def _patiently(self, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat a step that may be repeated, while a broker is not available. The time begins at the first failure, and anew
        when the copy has grown. A missing right ends it at once."""
        progress, since = -1, 0.0
        while True:
            try:
                await step()
            except BrokerError as error:
                if self._progress > progress:
                    progress, since = self._progress, time.monotonic()
                patience = _REFUSED_S if isinstance(error, AccessRefused) else _PATIENCE_S
                if not error.retriable or isinstance(error, NotAllowed) or time.monotonic() > since + patience:
                    raise
                await asyncio.sleep(_AGAIN_S)
            else:
                return

    @property
    def _progress(self) -> int:
        return 0 if self._copy is None else self._copy.progress

    async def _record(self, state: State, home: Home, **content: Any) -> bool:
        """content: see `MigrationStep`. home: the one with which the step began. If somebody has taken another step since, this
        one is void."""
        self._before(state)
        counts = await self._homes.record(self._stream, MigrationStep(state, by=self._by, **content), home)
        self._before(f"after {state}")
        return counts

    async def _begin(self, to: str) -> None:
        """Make the topic there, empty, and write down where its offsets begin."""
        await self._homes.refresh()
        home, self._copy = self.home, None
        if home.state is not None or home.readers == to:
            return
        if home.former not in ("", to):
            raise CommandFailed(
                f"{self._stream} was moved from {home.former}, and its former topic is still there",
                f"penstock migrate {self._stream} --finish, which deletes it, or --to {home.former}, which moves it back",
            )
        source, target = await self._named(home.readers), await self._named(to)
        self._show("creates the topic", 0, 1)
        try:
            partitions = await source.appender.partition_count(self._stream)
        except UnknownTopic as error:
            raise CommandFailed(f"{home.readers} has no topic {self._stream}", "penstock apply") from error
        self._require_whole_shards(home.readers, await source.reader.describe(self._stream), partitions)
        there = await incarnation_of(target, self._stream)
        if there is not None and there == await incarnation_of(source, self._stream):
            raise CommandFailed(
                f"{to} and {home.readers} are the same broker: both have the same topic {self._stream}",
                "another URL for one of them, or another ?prefix=, under `brokers:` in the pipe file",
            )
        self._before("create")
        if home.former == to:  # its end is not certain: an append whose writer was frozen may have arrived later
            await self._former.store_late(home, target, there)
            await self._former.delete(home, target, there)
        elif home.undone == to:
            await self._former.delete(home, target, home.copy)
        retention = (await self._load_pipes(to)).streams[self._stream].retention
        spec = TopicSpec(self._stream, partitions, retention_ms=int(retention * 1000))
        try:
            await target.admin.create_topic(spec)
        except TopicExists:
            await self._check_empty(target, to, partitions)
        await target.admin.create_own_topics()
        stored = await source.reader.describe(self._stream)
        starts = {one: held.start + self._homes.base(home.readers, self._stream, one) for one, held in stored.items()}
        copy = await target.admin.incarnation(self._stream)
        if self._fleet.brokers.noncontiguous & {home.readers, to}:
            await self._record("copying", home, to=to, starts=starts, copy=copy)
        else:
            await self._record("copying", home, to=to, bases=starts, copy=copy)
        await self._homes.refresh()

    def _require_whole_shards(self, name: str, shards: Collection[int], partitions: int) -> None:
        """Raises CommandFailed for a stream on Kinesis whose partitions are not its shards, one each."""
        if name in self._fleet.brokers.noncontiguous and set(shards) != set(range(partitions)):
            raise CommandFailed(
                f"{self._stream} has {partitions} partitions in other shards on {name}: it was split or merged, or has fewer. "
                "Which events of a shard belong to which partition is not known there",
                "a pipe that copies the stream into one on the other broker",
            )

    async def _check_empty(self, target: Broker, to: str, partitions: int) -> None:
        """The topic that is there was made by a killed command, or by somebody. Raises CommandFailed, UnsafeTopic."""
        there = await target.reader.describe(self._stream)
        if (
            len(there) != partitions
            or any(held.end for held in there.values())
            or await target.admin.compacted([self._stream])
        ):
            raise CommandFailed(
                f"broker {to} has a topic {self._stream} already: with events, compacted, or with another number of partitions",
                "the owner of that topic; or another ?prefix= for this broker in the pipe file",
            )
        await target.admin.check_durability([self._stream])

    async def _named(self, name: str) -> Broker:
        return await self._fleet.brokers.named(name)

    async def _newest_pipes(self) -> PipeFile:
        """Do as `_load_pipes` does, for the present migration. After the hand-over the stream must move, so its kind is no longer
        checked."""
        return await self._load_pipes(self.home.to if self.home.state == "copying" else None)

    async def _load_pipes(self, to: str | None) -> PipeFile:
        """The present pipe file. Raises CommandFailed when for longer than FILE_S the file is invalid, or forbids the move to
        `to`. Then no step was done, and the same command goes on."""
        deadline = time.monotonic() + FILE_S
        while True:
            try:
                return await asyncio.to_thread(self._load, to)
            except (BadConfiguration, CommandFailed) as error:
                if time.monotonic() > deadline:
                    text = f"the pipe file has changed, and {self._stream} cannot be moved with this file: {error}"
                    if self.home.state == "written":
                        text += f". Until the move is finished, no event of {self._stream} is delivered"
                    remedy = error.remedy if isinstance(error, CommandFailed) else "penstock check"
                    raise CommandFailed(text, f"{remedy}; then the same command, which goes on", status=2) from error
            await asyncio.sleep(_AGAIN_S)

    @property
    def _is_translated(self) -> bool:
        return bool(self._fleet.brokers.noncontiguous & {self.home.readers, self.home.to})

    async def _begins(self) -> Mapping[int, int]:
        """Where the copy begins, by the offsets of the stream."""
        copy = await self._stream_copy()
        if isinstance(copy, ExactCopy):
            return self.home.bases.get(self.home.to, {})
        return {**self.home.starts, **copy.begins}

    async def _stream_copy(self) -> ExactCopy | TranslatedCopy:
        """That of the migration which is under way: somebody else may have given one up and begun the next."""
        home = self.home
        if self._copy is None or self._copy_of != home.copy:
            self._copy_of = home.copy
            source, target = await self._named(home.readers), await self._named(home.to)
            here, there = home.bases.get(home.readers, {}), home.bases.get(home.to, {})
            if self._is_translated:
                require = partial(self._require_copying, home.copy)
                self._copy = TranslatedCopy(self._stream, source, target, here, home.starts, require)
            else:
                self._copy = ExactCopy(self._stream, source, target, here, there)
        return self._copy

    async def _follow(self) -> None:
        """Copy and compare, until little is left to do."""
        copy = await self._stream_copy()
        limit, most = (SLOW_NEARLY_S, SLOW_MOST_S) if self._is_translated else (NEARLY_S, MOST_S)
        while True:
            self._before("copy")
            total = await copy.total()
            took = await copy.follow()
            self._show("copies and compares", copy.events, max(total, copy.events))
            if took < limit:
                return
            limit = min(1.1 * limit, most)

    async def _hand_over(self) -> None:
        """The writers are held, or are continuing by themselves. Copy the rest, compare it, and give the stream to its new home.

        Nothing that was acknowledged ends after the lease, and `written` is void when a writer went on, also when a second
        command holds the writers again by then.
        """
        home = self.home
        if self._void_turns > _MOST_VOID_TURNS:
            await self._record("released", home)
            raise CommandFailed(
                f"{self._stream}: the writers went on {self._void_turns} times before the rest was copied, so it stays on "
                f"{self.home.readers}",
                "the same command when fewer events arrive; or --undo",
            )
        began = time.monotonic()
        copy = await self._stream_copy()
        try:
            await asyncio.sleep(timing.FOLLOW_S + _MARGIN_S)  # a writer that is not frozen knows by now
            with suppress(BrokerError):  # `complete` does the same again
                await copy.follow()
            await asyncio.sleep(began + timing.LEASE_S + _MARGIN_S - time.monotonic())
            self._show("holds the writers", copy.events, copy.events)
            self._before("drain")
            if (complete := await copy.complete()) is None:
                return
            if copy.origins.counts()[1]:
                raise CopyDiffers(f"{self._stream}: the copy lacks events", f"penstock migrate {self._stream} --undo")
            if not await self._record("written", home, **complete._asdict()):
                self._void_turns += 1
        except CopyDiffers:
            await self._record("released", home)
            raise
        finally:
            self._held_s = max(self._held_s, time.monotonic() - began)

    async def _move_groups(self) -> None:
        """When all readers have left: the position of each group, in the copy."""
        home = self.home
        self._show("waits until the readers have left", 0, 1)
        await asyncio.sleep(timing.LEASE_S + _MARGIN_S)
        await self._positions.wait_until_left(home, partial(self._require, home))
        await self._require(home)
        translate = await self._translation(home)
        self._before("groups")
        self._groups = await self._positions.move(home, translate, partial(self._require, home))
        await self._record("moved", home)

    async def _translation(self, home: Home) -> TranslateOffset:
        """For positions in a copy that is complete."""
        if not self._is_translated:
            return partial(self._same_offset, home)
        source, target = await self._named(home.readers), await self._named(home.to)
        here = home.bases.get(home.readers, {})
        pairs = home.pairs
        if isinstance(self._copy, TranslatedCopy) and self._copy_of == home.copy:  # it has more of them
            pairs = {one: self._copy.pairs.get(one) or some for one, some in pairs.items()}
        translator = OffsetTranslator(self._stream, source, target, here, home.ends, home.copy_ends, pairs)
        await translator.begin()
        return translator.translate

    async def _same_offset(self, home: Home, partition: int, offset: int) -> int:
        return max(offset - home.bases.get(home.to, {}).get(partition, 0), 0)

    async def undo(self) -> Result:
        """Give up a migration that has not handed over yet, and delete the copy. May be repeated."""
        await self._homes.refresh()
        home = self.home
        if home.state is None and home.undone:
            await self._former.delete(home, await self._named(home.undone), home.copy)
            return self.result()
        if home.state is None and not home.former:
            raise CommandFailed(f"{self._stream} is not being moved", f"penstock migrate {self._stream} --status")
        if home.state is None:
            raise CommandFailed(
                f"{self._stream} has moved to {home.readers}",
                f"penstock migrate {self._stream} --to {home.former}, which moves it back",
            )
        if home.state == "written":
            raise CommandFailed(
                f"{self._stream} is stored on {home.to} already, and its readers wait",
                f"penstock migrate {self._stream} --to {home.to}, which completes the move; "
                f"then --to {home.readers}, which moves it back",
            )
        if home.state == "held":
            await self._record("released", home)
        if await self._record("undone", self.home):
            await self._homes.refresh()
            await self._former.delete(self.home, await self._named(home.to), self.home.copy)
        return self.result()

    async def finish(self) -> Result:
        """Delete the former topic. The move cannot be undone afterwards."""
        await self._homes.refresh()
        home = self.home
        if home.state is not None or not home.former:
            text = f"is being moved to {home.to}" if home.state is not None else "has no former topic"
            raise CommandFailed(f"{self._stream} {text}: there is nothing to finish", "--status")
        former = await self._named(home.former)
        incarnation = await incarnation_of(former, self._stream)
        await self._former.store_late(home, former, incarnation)
        await self._former.delete(home, former, incarnation)
        await self._patiently(partial(self._record_finished, home))
        return self.result()

    async def _record_finished(self, home: Home) -> None:
        """May be repeated. Raises as `_require`."""
        await self._homes.refresh()
        if self.home.state is None and not self.home.former:
            return  # an earlier attempt without an answer has done it
        await self._require(home)
        await self._record("finished", home)

    async def _require(self, home: Home) -> None:
        """Raises CommandFailed when somebody has moved the stream meanwhile: this command may have been frozen for hours."""
        await self._homes.refresh()
        if self.home.epoch != home.epoch:
            raise self._moved_meanwhile()

    async def _require_copying(self, copy: str) -> None:
        """Raises CommandFailed when this copy is handed over or given up already: by a second command, while this one was frozen.
        What it appends now would be events of the stream."""
        await self._homes.refresh()
        if self.home.copy != copy or self.home.state not in ("copying", "held"):
            raise self._moved_meanwhile()

    def _moved_meanwhile(self) -> CommandFailed:
        return CommandFailed(
            f"somebody else has moved {self._stream} meanwhile, so this command has ended",
            f"penstock migrate {self._stream} --status",
        )
