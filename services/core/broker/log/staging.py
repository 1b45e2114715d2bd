"""Blocks that distributed tasks wrote and a driver has not committed yet: one synced file per task attempt.

Name: <hash of the writer>-<epoch>-<random>.block. A committed or older epoch's files are leftovers and are removed by the
next commit of that writer; those of jobs that never came back, after a day.
"""

import hashlib
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from zlib import crc32

import msgspec

from services.core.broker.errors import DataDamaged
from services.core.broker.log.frames import Packed
from services.core.broker.log.layout import DataFolder
from services.core.folders import make_folder, sync_folder

KEEP_SECONDS = 24 * 3600

_Blocks = list[tuple[int, list[Packed]]]


def write_blocks(
    folder: DataFolder, topic: str, writer: str, epoch: int, blocks: Mapping[int, Sequence[Packed]]
) -> str:
    """Store the blocks durably, invisible; gives the token that `read_blocks` takes."""
    place = folder.staging(topic)
    make_folder(place, mode=0o700)
    token = f"{_prefix(writer)}{epoch}-{uuid.uuid4().hex}.block"
    body = msgspec.msgpack.encode(list(blocks.items()))
    draft = place / f".{token}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(crc32(body).to_bytes(4, "big") + body)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(place / token)
        sync_folder(place)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return token


def read_blocks(folder: DataFolder, topic: str, tokens: Iterable[str]) -> dict[int, list[Packed]] | None:
    """The blocks of all tokens by partition, in the tokens' order. None when a file is gone. Raises DataDamaged."""
    found: dict[int, list[Packed]] = {}
    for token in tokens:
        try:
            data = _path(folder, topic, token).read_bytes()
        except FileNotFoundError:
            return None
        if crc32(data[4:]).to_bytes(4, "big") != data[:4]:
            raise DataDamaged(topic, (), f"the staged block {token} is altered. Try: running the batch again")
        for partition, blocks in msgspec.msgpack.decode(data[4:], type=_Blocks):
            found.setdefault(partition, []).extend(blocks)
    return found


def remove_blocks(folder: DataFolder, topic: str, tokens: Iterable[str]) -> None:
    """Remove staged files; those that are gone already are fine."""
    for token in tokens:
        _path(folder, topic, token).unlink(missing_ok=True)


def remove_epochs(folder: DataFolder, topic: str, writer: str, epoch: int) -> None:
    """Remove everything this writer staged for this epoch or an older one."""
    prefix = _prefix(writer)
    for path in folder.staging(topic).glob(f"{prefix}*.block"):
        if int(path.name.removeprefix(prefix).split("-")[0]) <= epoch:
            path.unlink(missing_ok=True)


def remove_leftovers(folder: DataFolder) -> int:
    """Remove what jobs that died staged more than a day ago; how many files."""
    removed = 0
    for path in (folder.root / "staging").glob("*/*.block"):
        if time.time() - path.stat().st_mtime > KEEP_SECONDS:
            path.unlink(missing_ok=True)
            removed += 1
    return removed


def _prefix(writer: str) -> str:
    return hashlib.sha256(writer.encode()).hexdigest()[:16] + "-"


def _path(folder: DataFolder, topic: str, token: str) -> Path:
    if "/" in token or not token.endswith(".block"):
        raise ValueError(f"{token[:80]!r} is not a staging token")
    return folder.staging(topic) / token
