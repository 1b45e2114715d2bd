"""The broker of a fleet: the one of `--broker`, and those that the pipe file names, as one.

Streams live where the pipe file says (`on`), or where a migration has moved them (`homes`). Everything else is on the fleet's own
broker: outputs, retries, parked events, dead letters, the ledger, the controls. So nothing of a stream's pipes moves with it.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from services.core.broker.connect import BadBrokerUrl, is_kinesis, open_broker
from services.core.broker.contract import Broker
from services.core.broker.errors import NotAllowed, UnsafeTopic
from services.core.broker.several.broker import open_several
from services.core.broker.several.brokers import DEFAULT, Opening
from services.core.control.homes import Homes
from services.core.pipe_file.existing_topics import existing_topics, target_homes
from services.core.pipe_file.pipes import PipeFile


def open_fleet_broker(url: str, pipes: PipeFile | None) -> AbstractAsyncContextManager[Broker]:
    """url: that of `--broker`. pipes: None for what needs no stream.

    Raises BadBrokerUrl at once. Entering raises BrokerError kinds of the fleet's own broker, and UnsafeTopic when a stream was
    moved to a broker that the pipe file does not name.
    """
    if pipes is None:
        return open_broker(url)
    if is_kinesis(url) and not pipes.brokers:  # nothing is ever moved there
        return open_own_broker(url, pipes)
    return open_with_homes(url, pipes)


def open_own_broker(url: str, pipes: PipeFile) -> AbstractAsyncContextManager[Broker]:
    """As `open_fleet_broker`, of the streams on the fleet's own broker. Their offsets are those that it gives, as Spark reads
    them, also after a migration there."""
    return open_broker(url, existing_topics(pipes, DEFAULT))


def open_with_homes(url: str, pipes: PipeFile) -> AbstractAsyncContextManager[Broker]:
    """As `open_fleet_broker`. It is a `SeveralBrokers` when the pipe file names brokers."""
    if is_kinesis(url):
        raise BadBrokerUrl(
            "the pipe file names `brokers`, and the fleet's own broker is Kinesis. On Kinesis, all processes together may read a "
            "shard five times a second, so they cannot follow where streams live. Try: a pipe file without `brokers`, or Kafka "
            "as the fleet's own broker"
        )
    openings = {}
    for name, address in pipes.brokers.items():
        opening = partial(open_broker, address, existing_topics(pipes, name))
        opening()  # raises BadBrokerUrl
        openings[name] = opening
    streams = {name: stream.home for name, stream in pipes.streams.items()}
    noncontiguous = [name for name, address in pipes.brokers.items() if is_kinesis(address)]
    return open_over(
        open_broker(url, existing_topics(pipes, DEFAULT)), openings, streams, target_homes(pipes), noncontiguous
    )


@asynccontextmanager
async def open_over(
    opening: AbstractAsyncContextManager[Broker],
    openings: Mapping[str, Opening],
    streams: Mapping[str, str],
    targets: Mapping[str, str],
    noncontiguous: Collection[str],
) -> AsyncIterator[Broker]:
    """opening: of the fleet's own broker. The others: as in `open_several`. streams,
    targets: as in `Homes`. Raises as `open_fleet_broker`."""
    async with opening as own:
        homes = Homes(streams, own, targets)
        try:
            await homes.refresh()
        except NotAllowed:  # without `brokers` most services need no right to it, and nothing was moved
            if openings:
                raise
        if lost := homes.with_streams() - {DEFAULT, *openings}:
            raise UnsafeTopic([(name, "on", _NOT_NAMED.format(lost=there)) for name, there in homes.on(lost)])
        if not openings and not homes.has_moves:
            yield own
            return
        following = asyncio.create_task(homes.follow(), name="homes")
        try:
            async with open_several(own, openings, homes, noncontiguous) as broker:
                yield broker
        finally:
            following.cancel()
            await asyncio.wait((following,))


_NOT_NAMED = (
    "it was moved to broker {lost}, which the pipe file does not name. Try: brokers: {{{lost}: URL}}, and on: {lost}"
)
