"""The broker of a fleet: the one of `--broker`, and those that the pipe file names, as one.

Streams live where the pipe file says (`on`). Everything else is on the fleet's own broker: outputs, retries, parked events, dead
letters, the ledger, the controls. So a stream can be moved, and nothing of its pipes moves with it.
"""

from contextlib import AbstractAsyncContextManager
from functools import partial

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker
from services.core.broker.several.broker import open_several
from services.core.broker.several.brokers import DEFAULT, Places
from services.core.existing_topics import existing_topics
from services.core.pipes import PipeFile


def open_fleet_broker(url: str, pipes: PipeFile | None) -> AbstractAsyncContextManager[Broker]:
    """url: that of `--broker`. pipes: None for what needs no stream.

    Raises BadBrokerUrl at once; entering raises BrokerError kinds of the fleet's own broker.
    """
    if pipes is None:
        return open_broker(url)
    default = open_broker(url, existing_topics(pipes, DEFAULT))
    if not pipes.brokers:
        return default
    openings = {}
    for name, address in pipes.brokers.items():
        opening = partial(open_broker, address, existing_topics(pipes, name))
        opening()  # raises BadBrokerUrl
        openings[name] = opening
    return open_several(default, openings, Places({name: stream.home for name, stream in pipes.streams.items()}))
