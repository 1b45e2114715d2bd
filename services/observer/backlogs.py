"""The lag of each destination's group by topic, as the broker reports it, also while the group has no member."""

import asyncio

import structlog

from services.core.broker.contract import Admin, Lag
from services.core.broker.errors import BrokerError
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import delivery_group, delivery_topics
from services.core.process.lifecycle import wait_for_stop
from services.core.process.progress import Turns
from services.observer.view import ShardView

log = structlog.get_logger()

FOLLOW_S = 10.0
WITHIN_S = 5.0


class Backlogs:
    def __init__(self, pipes: PipeFile, admin: Admin) -> None:
        self._admin = admin
        self._asked = [
            (name, topic, delivery_group(name, destination.name))
            for name, pipe in pipes.pipes.items()
            for topic in delivery_topics(name, pipe)
            for destination in pipe.destinations
        ]
        self._found: dict[tuple[str, str, str], ShardView] = {}
        self._failing = False
        self.turns = Turns("the lags of groups")

    def of(self, pipe: str) -> tuple[ShardView, ...]:
        """As of the last request; without groups whose request failed."""
        return tuple(view for (name, _, _), view in self._found.items() if name == pipe)

    async def follow(self, stopping: asyncio.Event) -> None:
        """Ask every FOLLOW_S until `stopping`. The first of several failures is logged."""
        while not stopping.is_set():
            for asked in self._asked:
                await self._ask(asked)
                self.turns.next()
            self.turns.next()
            await wait_for_stop(stopping, FOLLOW_S)

    async def _ask(self, asked: tuple[str, str, str]) -> None:
        _, topic, group = asked
        try:
            async with asyncio.timeout(WITHIN_S):
                lags = await self._admin.group_lag(group, topic)
        except (BrokerError, TimeoutError) as error:
            self._found.pop(asked, None)
            if not self._failing:
                log.warning(
                    "backlog_unknown", group=group, topic=topic, error=str(error), hint="the broker is asked again"
                )
            self._failing = True
            return
        self._failing = False
        self._found[asked] = _view(topic, group, lags)


def _view(topic: str, group: str, lags: dict[int, Lag]) -> ShardView:
    behind = {partition: lag for partition, lag in lags.items() if lag.records}
    furthest = max(behind, key=lambda partition: behind[partition].records, default=None)
    records, millis = sum(lag.records for lag in lags.values()), max((lag.millis for lag in lags.values()), default=0)
    return ShardView(topic, group, len(lags), furthest, records, millis)
