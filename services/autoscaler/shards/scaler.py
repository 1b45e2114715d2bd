"""All streams of a pipe file: one look at the fleet for all of them, a decision for each."""

import asyncio
from collections.abc import Collection

import structlog

from services.autoscaler.counters import Counters
from services.autoscaler.shards.rules import RULES, Rules
from services.autoscaler.shards.stream import Announce, StreamScaler, to_nobody
from services.autoscaler.targets import NoTargets, find_targets
from services.core.broker.resharding import Resharding
from services.core.lifecycle import wait_for_stop

log = structlog.get_logger()


class ShardScaler:
    """Looks every `every` seconds at what the processes say of themselves, and offers it to each stream."""

    def __init__(
        self,
        topics: Collection[str],
        resharding: Resharding,
        targets: str,
        *,
        dry_run: bool,
        rules: Rules = RULES,
        every: float,
        announce: Announce = to_nobody,
    ) -> None:
        self._targets, self._every = targets, every
        self._counters = Counters()
        self._streams = [StreamScaler(topic, resharding, rules, dry_run=dry_run, announce=announce) for topic in topics]
        self._silent: tuple[str, ...] = ()
        self._warned = ""
        self.waits_for: str | None = "no figures yet"

    async def run(self, stopping: asyncio.Event) -> None:
        """Until the stop."""
        async with asyncio.TaskGroup() as tasks:
            for stream in self._streams:
                tasks.create_task(stream.run(stopping))
            while not stopping.is_set():
                await self._look()
                await wait_for_stop(stopping, self._every)

    async def _look(self) -> None:
        try:
            addresses = await find_targets(self._targets)
        except NoTargets as error:
            if self._warned != str(error):
                log.warning("no_targets", error=str(error), hint="without them no stream gets other shards")
            # It may be here for the groups alone, so it is as ready as it gets.
            self._warned, self.waits_for = str(error), None
            return
        self._warned = ""
        window = await self._counters.look(addresses)
        if window is None:
            self.waits_for = "no process of the targets has answered twice"
            return
        if window.silent and window.silent != self._silent:
            log.warning("targets_silent", addresses=window.silent, hint="no shards are taken away meanwhile")
        self._silent, self.waits_for = window.silent, None
        for stream in self._streams:
            stream.offer(window)
