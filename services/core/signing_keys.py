"""The signing keys of one webhook as they are in use now: kept like their file, so that a rotation needs no restart."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from services.core import metrics
from services.core.file_watch import FileWatch
from services.core.pipes import Secret
from services.core.signature import BadSecret, SigningKey
from services.core.signing_secret import parse_secret, read_secret

log = structlog.get_logger()

_STALE = (
    "requests are signed with the keys that were there before: one that was taken away is still used here. "
    "Try: mend the file, or restart the service"
)


class SigningKeys:
    """`current`: newest first; whoever signs looks at it each time. Empty: nothing is signed."""

    def __init__(self, current: Sequence[SigningKey] = ()) -> None:
        self.current = tuple(current)


class SecretWatch(FileWatch[tuple[SigningKey, ...]]):
    """`keys`, kept like the file of a secret. name: `pipe/destination`, or whose keys they are. `load` raises BadSecret."""

    def __init__(
        self, name: str, secret: Secret, folder: Path, keys: SigningKeys, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """folder: as for `read_secret`."""

        def use(current: tuple[SigningKey, ...]) -> None:
            keys.current = current
            log.info("signing_keys_loaded", name=name, keys=len(current))

        failed = metrics.SIGNING_KEYS_FAILURES.labels(name)
        self._name = name
        super().__init__(
            f"the signing secret of {name}",
            lambda known: _read(secret, folder, known),
            use,
            expected=BadSecret,
            failed=failed.inc,
            stale=_STALE,
            clock=clock,
        )

    async def run(self, stopping: asyncio.Event) -> None:
        """As in FileWatch."""
        metrics.SIGNING_KEYS_AGE.labels(self._name).set_function(lambda: self.age)
        await super().run(stopping)


def _read(secret: Secret, folder: Path, known: bytes) -> tuple[bytes, tuple[SigningKey, ...]] | None:
    text, where = read_secret(secret, folder, {})
    digest = hashlib.sha256(text.encode()).digest()
    return None if digest == known else (digest, parse_secret(text, where))
