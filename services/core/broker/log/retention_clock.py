"""The time by which retention judges ages: it cannot run away with a wrong clock. Blocking.

A clock that is days ahead would delete days of records early. So this time follows the system's, but never faster than
twice as fast as time passes (CLOCK_BOOTTIME) while the log is in use; how far it has come stands in `retention.clock`. Without
that file it begins at most a day after the newest stored record. It is late where the machine was off, which keeps
records for longer, and catches up in as long as that took. No source of time is asked that could be wrong in the same way.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import msgspec

from services.core.broker.errors import BrokerError
from services.core.broker.log.clock import WallClock, boot_id, boot_ms
from services.core.broker.log.faults import classified
from services.core.broker.log.layout import DataFolder
from services.core.broker.log.store import Store
from services.core.broker.log.topics import topic_names
from services.core.metrics import LOG_RETENTION_BEHIND

_LOG = logging.getLogger(__name__)

_FIRST_JUMP_MS = 24 * 3_600_000
_LATE_MS = 3_600_000
"""From here on somebody is told, once in as long."""


class _State(msgspec.Struct, frozen=True):
    """Where the time was at a moment of a boot. told_ms: the last moment of that boot at which somebody was told."""

    now_ms: int
    boot_ms: int
    boot_id: str
    told_ms: int | None = None


def read_retention_clock(folder: DataFolder, clock: WallClock) -> int:
    """Milliseconds since the epoch, for retention; at most what `clock` says. Remembers how far it has come.

    For one process at a time. When it cannot be stored, the next call goes on from where the last one was.
    """
    system, boot, moment = clock.now_ms(), boot_id(), boot_ms()
    file = folder.root / "retention.clock"
    last = _read(file)
    told = None
    if last is None:
        limit = _newest_stored(folder, system) + _FIRST_JUMP_MS
    elif last.boot_id == boot:
        limit = last.now_ms + 2 * max(0, moment - last.boot_ms)
        told = last.told_ms
    else:
        limit = last.now_ms + 2 * moment
    now = min(system, limit)
    behind = system - now
    LOG_RETENTION_BEHIND.set(behind / 1000)
    if behind > _LATE_MS and (told is None or moment - told > _LATE_MS):
        told = moment
        _LOG.warning(
            "the system's clock is %.1f h ahead of what retention goes by, in %s: records are kept for longer until it has"
            " caught up. Try: nothing where the machine was off for so long; else set the clock",
            behind / 3_600_000,
            folder.root,
        )
    reached = now if last is None else max(now, min(last.now_ms, limit))
    _write(file, _State(reached, moment, boot, told))
    return now


def _newest_stored(folder: DataFolder, otherwise: int) -> int:
    """When the newest record of any topic was stored; `otherwise` where there is none."""
    newest = []
    for topic in topic_names(folder):
        with suppress(BrokerError), classified(topic):
            store = Store.open(folder, topic)
            try:
                newest += [head.stored_ms for head in store.heads() if head.stored_ms]
            finally:
                store.close()
    return max(newest, default=otherwise)


def _read(file: Path) -> _State | None:
    """None when it is not there, or not what was written."""
    try:
        crc, _, body = file.read_bytes().partition(b" ")
        return msgspec.json.decode(body, type=_State) if int(crc) == crc32(body) else None
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def _write(file: Path, state: _State) -> None:
    """Not synced: what a power cut takes of it only makes the time late."""
    body = msgspec.json.encode(state)
    draft = file.with_suffix(".clock-new")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"%d %s" % (crc32(body), body))
        finally:
            os.close(fd)
        draft.rename(file)
    except OSError as error:
        _LOG.warning("%s cannot be written: %s", file, error)
