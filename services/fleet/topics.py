"""Provisioning from the command line: a broker that is just starting gets some time."""

import asyncio
import time

from services.core.broker.connect import BadBrokerUrl, open_broker
from services.core.broker.errors import BrokerError, UnsafeTopic
from services.core.pipes import PipeFile
from services.core.provision import PartitionsDiffer, Provisioned, ensure_topics
from services.fleet.problem import CommandFailed

PATIENCE_S = 30.0


async def provision(broker: str, pipes: PipeFile, *, grow: bool = False) -> Provisioned:
    """Create what the pipe file implies; retries for up to 30 s while the broker is away. Raises CommandFailed."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            async with open_broker(broker) as opened:
                return await ensure_topics(opened.admin, pipes, grow=grow)
        except BadBrokerUrl as error:
            raise CommandFailed(str(error), status=2) from error
        except PartitionsDiffer as error:
            raise CommandFailed(str(error)) from error
        except UnsafeTopic as error:
            raise CommandFailed(str(error), status=2) from error
        except BrokerError as error:
            if not error.retriable or time.monotonic() > deadline:
                raise CommandFailed(
                    f"the topics could not be created on {broker}: {error}", "whether the broker runs and answers"
                ) from error
        await asyncio.sleep(0.5)
