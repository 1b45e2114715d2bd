"""The positions of the groups in a stream that moves: checked before the hand-over, copied when its readers have left."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial

from services.core.broker.contract import Broker
from services.core.broker.errors import Unavailable
from services.core.control.homes import Home, base_of
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import delivery_group, lanes_of, removed_lanes
from services.fleet.migrate.copying import gather_few
from services.fleet.problem import CommandFailed

LEAVE_S = 120.0
_AGAIN_S = 0.2

TranslateOffset = Callable[[int, int], Awaitable[int]]
"""Gives the offset of the copy, by those of its broker, for a partition and an offset of the stream."""

_HOW = "as in 'When a partition stops' in docs/operating.md, then the same command"


class GroupPositions:
    """newest: gives the present pipe file, or raises CommandFailed. named: opens a broker of the fleet. All methods use the
    present file, raise BrokerError kinds, and may be repeated."""

    def __init__(
        self, stream: str, newest: Callable[[], Awaitable[PipeFile]], named: Callable[[str], Awaitable[Broker]]
    ) -> None:
        self._stream, self._newest, self._named = stream, newest, named
        self._groups: dict[str, bool] = {}
        """All groups that may have a position in the stream; True if the pipe file has the group's destination. For a former name
        no operator can decide about a gap any more."""

    async def _load_groups(self) -> None:
        """Find the groups by the present file. A destination that the file had at an earlier call, and no longer has, counts as a
        former name, whatever the file says about its events: its lane runs until the next start of the fleet."""
        pipes = await self._newest()
        known, former = _groups_of(lanes_of(pipes)), _groups_of(removed_lanes(pipes).keys())
        self._groups = {group: group in known for group in sorted(known | former | self._groups.keys())}

    async def check(self, home: Home, begins: Mapping[int, int]) -> None:
        """Raises CommandFailed for a group whose next events are gone already: at its new place nobody would notice. begins: of
        the copy, by the offsets of the stream."""
        await self._load_groups()
        for group, positions in (await self._find(home)).items():
            gone = [partition for partition, at in positions.items() if at < begins.get(partition, at)]
            if gone and self._groups[group]:
                raise CommandFailed(
                    f"the group {group} has not read events of {self._stream}[{gone[0]}] that retention has removed",
                    f"penstock group skip, {_HOW}",
                )

    async def wait_until_left(self, home: Home, require: Callable[[], Awaitable[None]]) -> None:
        """Until no member of a group reads at the former home. Raises CommandFailed after LEAVE_S. require: as in `move`."""
        await self._load_groups()
        source = await self._named(home.readers)
        deadline = time.monotonic() + LEAVE_S
        while still := await self._with_members(source):
            if time.monotonic() > deadline:
                raise CommandFailed(
                    f"members of {', '.join(still)} still read {self._stream} on {home.readers} after {LEAVE_S:.0f} s. "
                    f"Until they have left, no event of {self._stream} is delivered",
                    "a restart of each expel that has another version or a pipe file without `brokers`; then the same command",
                )
            await asyncio.sleep(_AGAIN_S)
            await require()  # somebody else may have completed the move, and moved the stream back

    async def move(self, home: Home, translate: TranslateOffset, require: Callable[[], Awaitable[None]]) -> int:
        """Set each group to its position in the copy. translate: as in `TranslateOffset`. require: raises when somebody else has
        completed the move: an offset may take hours to find, and groups may read there already. Gives the number of groups.
        Raises Unavailable while a group has members that read other streams on the new broker. Raises it also while members of a
        destination that was added to the file after `wait_until_left` read on the former one."""
        await self._load_groups()
        source, target = await self._named(home.readers), await self._named(home.to)
        if still := await self._with_members(source):
            raise Unavailable(f"members of {', '.join(still)} still read {self._stream} on {home.readers}")
        moved = await self._find(home)
        for group, positions in moved.items():
            # Nothing of the stream is delivered until all are found.
            offsets = await gather_few([partial(translate, one, at) for one, at in positions.items()])
            await require()
            processed = {one: at - 1 for one, at in zip(positions, offsets, strict=True)}
            await target.admin.set_committed(group, self._stream, processed)
        return len(moved)

    async def _find(self, home: Home) -> dict[str, dict[int, int]]:
        """By group, where it continues in the stream. Raises CommandFailed for a group without its positions.

        A group may have read an append that came late to the former topic: these events are no part of the copy, and other events
        have their offsets there. So no group continues behind the end of the copy.
        """
        source = await self._named(home.readers)
        admin, here = source.admin, home.bases.get(home.readers, {})
        ends = home.ends if home.state == "written" else {}
        is_contiguous = source.features.contiguous_offsets

        def by_stream(partition: int, at: int) -> int:
            offset = at + base_of(here, partition)
            return min(offset, ends.get(partition, offset))

        found: dict[str, dict[int, int]] = {}
        for group in self._groups:
            positions = await admin.positions(group, self._stream)
            begun = bool(positions) or await admin.has_begun(group, self._stream)
            # On Kinesis a group that reads a shard from its oldest record has no position there.
            oldest = dict(home.starts) if begun and not is_contiguous else {}
            if positions or oldest:
                found[group] = oldest | {
                    one: by_stream(one, at)
                    for one, at in positions.items()
                    if not home.starts or one in home.starts  # a shard that was made later has only late events
                }
            elif self._groups[group] and begun:
                raise CommandFailed(
                    f"the broker no longer has the position of group {group} in {self._stream}: nobody has read for days",
                    f"penstock group reset, {_HOW}",
                )
        return found

    async def _with_members(self, broker: Broker) -> list[str]:
        """The groups that have a position in the stream, and living members on this broker."""
        admin = broker.admin
        return [one for one in self._groups if await admin.has_begun(one, self._stream) and await admin.members(one)]


def _groups_of(lanes: Iterable[str]) -> set[str]:
    return {delivery_group(*lane.split("/", 1)) for lane in lanes}
