"""API keys and signing secrets that operators rotate while events flow: the files, the clients that learn of it, the judge.

The files are in memory. The code that reads, watches and parses them is the real one. What holds: once the services have had time
to load a file, a revoked key is refused, a valid one is taken, and requests are signed with the secrets of the file and no other.
While a file is unusable, the content before it stays in use.
"""

import asyncio
import binascii
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from services.core.security.file_watch import UnusableFile
from services.core.security.keys import PREFIX, ApiKey, KeyRing
from services.core.security.signing import PREFIX as SECRET_PREFIX
from services.core.security.signing import BadSignature, SigningKey, verify
from services.core.yaml_source import BadConfiguration, Problem
from tests.simulation.machine import WORLD, current_process

if TYPE_CHECKING:
    from tests.simulation.fleet_history import FleetHistory

LOADED_S = 4.0
"""Within so many seconds a process that runs has loaded a file: it looks every two seconds at the latest."""
KEYS_FILE = Path("/simulated/keys.yaml")


class SecretFile:
    """One file's lines, and when they changed. valid: by line, since when; gone: by line, since when."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.version = 0
        self.is_broken = False
        self.changed_at = 0.0
        self.gone: dict[str, float] = {}

    def put(self, lines: list[str], now: float) -> None:
        """The new content."""
        self.gone |= {line: now for line in self.lines if line not in lines}
        self.lines, self.changed_at = list(lines), now
        self.version += 1

    def mend(self, now: float) -> None:
        """It can be read again."""
        self.is_broken, self.changed_at = False, now


class Rotation:
    """The files of one history: the keys of ingest's clients, and a secret for each destination that signs."""

    def __init__(self, history: "FleetHistory") -> None:
        self._history = history
        self._count = 0
        self._is_calm = False
        self.keys = SecretFile()
        self.secrets: dict[str, SecretFile] = {}
        self.token = ""
        """The key that clients use."""
        self.was_broken = False
        """A service that starts then refuses its configuration."""
        if history.choice.has_keys:
            self.token = self._new_token()
            self.keys.put([self.token], 0.0)
        for destination in history.choice.pipes["pipes"]["p"]["destinations"]:
            if "secret" in destination["webhook"]:
                name = destination["webhook"]["secret"]["file"]
                self.secrets[name] = SecretFile()
                self.secrets[name].put([self._new_secret()], 0.0)

    def _new_token(self) -> str:
        self._count += 1
        return f"{PREFIX}_{self._count:08}_{self._history.rng.randbytes(20).hex()}"

    def _new_secret(self) -> str:
        return SECRET_PREFIX + binascii.b2a_base64(self._history.rng.randbytes(32), newline=False).decode()

    # What processes read.

    def read_keys(self, known: bytes) -> tuple[bytes, KeyRing] | None:
        """As `keys.read_ring`."""
        if self.keys.is_broken:
            raise BadConfiguration([Problem(str(KEYS_FILE), "", "is empty. Try: keys: []")])
        digest = b"%d" % self.keys.version
        return None if digest == known else (digest, KeyRing([_entry(token) for token in self.keys.lines]))

    def read_secret(self, path: Path) -> str:
        """As `file_watch.read_private`."""
        file = self.secrets[path.name]
        if file.is_broken:
            raise UnusableFile("cannot be read: Permission denied")
        return "\n".join(file.lines)

    def problems(self) -> list[Problem]:
        """Why expel cannot start now."""
        return [Problem(name, "", "cannot be read") for name, file in sorted(self.secrets.items()) if file.is_broken]

    # What operators do.

    async def rotate_keys(self) -> None:
        """A new key for the clients. In a hurry the old one is revoked first."""
        if self.token:
            old, new = self.token, self._new_token()

            async def switch() -> None:
                self.token = new

            await self._rotate(self.keys, old, new, switch)

    async def rotate_secret(self) -> None:
        """A new secret for one destination; its receiver takes the old one for as long as the file has it."""
        if not self.secrets:
            return
        file = self.secrets[self._history.rng.choice(sorted(self.secrets))]

        async def switch() -> None:
            """Receivers know all that the file has."""

        await self._rotate(file, file.lines[0], self._new_secret(), switch)

    async def _rotate(self, file: SecretFile, old: str, new: str, switch: Callable[[], Awaitable[None]]) -> None:
        history = self._history
        rng, now = history.rng, history.machine.time
        if rng.random() < 0.3:
            self._break(file)
        if rng.random() < 0.5:
            await self._sleep()
            file.put([new, *file.lines], now())
            await self._sleep()
            await switch()
            await self._sleep()
            file.put([line for line in file.lines if line != old], now())
        else:
            file.put([new, *(line for line in file.lines if line != old)], now())
            await self._sleep()
            await switch()

    async def _sleep(self) -> None:
        await asyncio.sleep(self._history.rng.choice((0.0, 0.5, LOADED_S)))

    def _break(self, file: SecretFile) -> None:
        """Somebody edits it, and its mode or its content is wrong for some seconds."""
        if self._is_calm:
            return
        file.is_broken = self.was_broken = True
        machine = self._history.machine
        machine.trace("a file of secrets is unusable")
        machine.call_later(self._history.rng.uniform(0.2, 6.0), lambda: file.mend(machine.time()), context=WORLD)

    def calm(self) -> None:
        """All files can be read from now on."""
        self._is_calm = True
        for file in (self.keys, *self.secrets.values()):
            if file.is_broken:
                file.mend(self._history.machine.time())

    # The judge.

    def judge_answer(self, token: str, sent_at: float, status: int) -> None:
        """Ingest answered a request with this key."""
        if not token or self.keys.is_broken or sent_at < self._loaded_at(self.keys):
            return
        is_valid = token in self.keys.lines
        if is_valid == (status == 401):
            self._complain(f"ingest answered {status} to a {'valid' if is_valid else 'revoked'} key")

    def judge_request(self, name: str, headers: Mapping[str, str], body: bytes) -> None:
        """A receiver got a request."""
        now = self._history.machine.time()
        file = self.secrets.get(f"{name}.secret")
        if file is None:
            return
        wall_s = self._history.cluster.store.wall_ms() / 1000
        is_loaded = not file.is_broken and now >= self._loaded_at(file)
        wanted = file.lines if is_loaded else [*file.lines, *file.gone]
        if not _is_signed(wanted, headers, body, wall_s):
            self._complain(f"{name}: a request is not signed with a secret of its file")
        if is_loaded and _is_signed(list(file.gone), headers, body, wall_s):
            self._complain(
                f"{name}: a request is signed with a secret that is gone since {now - file.changed_at:.1f} s"
            )

    def _loaded_at(self, file: SecretFile) -> float:
        return max(file.changed_at, self._history.deaf_until) + LOADED_S

    def _complain(self, text: str) -> None:
        self._history.oracle.complaints.append(text)


def _is_signed(lines: list[str], headers: Mapping[str, str], body: bytes, now: float) -> bool:
    try:
        verify([SigningKey.parse(line) for line in lines], headers, body, now=now)
    except BadSignature:
        return False
    return True


def _entry(token: str) -> ApiKey:
    _, number, secret = token.split("_")
    digest = hashlib.sha256(secret.encode()).hexdigest()
    return ApiKey(id=number, hash=digest, streams=["*"], scopes=["ingest"])


def _rotation() -> Rotation:
    process = current_process()
    assert process is not None
    rotation: Rotation = process.found["rotation"]
    return rotation


def read_keys(_path: Path, known: bytes) -> tuple[bytes, KeyRing] | None:
    """In place of `keys.read_ring`: the keys of the process's history."""
    return _rotation().read_keys(known)


def read_private(path: Path, _remedy: str = "") -> str:
    """In place of `file_watch.read_private`: a secret of the process's history."""
    return _rotation().read_secret(path)
