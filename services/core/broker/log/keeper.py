"""Retention and clean-up, now and then, by one of the processes that have the folder open."""

import asyncio
import fcntl
import logging
import os
import random

from services.core.broker.errors import BrokerError
from services.core.broker.log import retention, staging
from services.core.broker.log.clock import WallClock
from services.core.broker.log.layout import DataFolder
from services.core.broker.log.retention_clock import read_retention_clock
from services.core.broker.log.topics import topic_names

_LOG = logging.getLogger(__name__)


async def keep(folder: DataFolder, clock: WallClock, interval: float) -> None:
    """Every `interval` seconds apply each topic's retention, unless another process does. Runs until cancelled."""
    await asyncio.sleep(interval * random.random())  # noqa: S311 - spreads the processes of a fleet, no secret
    while True:
        await asyncio.to_thread(keep_once, folder, clock)
        await asyncio.sleep(interval)


def keep_once(folder: DataFolder, clock: WallClock) -> bool:
    """One pass; False when another process is at it. A topic that fails is logged and tried again at the next pass."""
    try:
        fd = os.open(folder.root / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _LOG.warning("retention in %s failed: %s", folder.root, error)
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _enforce_all(folder, clock)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _enforce_all(folder: DataFolder, clock: WallClock) -> None:
    now_ms = read_retention_clock(folder, clock)
    for topic in topic_names(folder):
        try:
            removed = retention.enforce(folder, topic, now_ms)
        except BrokerError as error:
            _LOG.warning("retention of topic %s failed: %s", topic, error)
            continue
        if removed:
            _LOG.info("retention removed %d records of topic %s", sum(removed.values()), topic)
    try:
        staging.remove_leftovers(folder)
    except OSError as error:
        _LOG.warning("removing left-over staged blocks failed: %s", error)
