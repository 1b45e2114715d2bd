"""The claim on a checkpoint: which process runs its queries, where no lock of the operating system can be trusted (ADR 0017).

A claim is a file with a number, `claims/8`, that can be created once. The highest number counts, whatever became of its process.
Beside it the holder keeps a **mark** (`8-TOKEN`), without which it writes nothing, and a **sign of life** (`8.alive`), which it
changes every few seconds. A successor takes the next number, removes all lower marks, and only then begins.

The sign of life only decides when a successor may begin, by the successor's own clock. A holder that was frozen and replaced is
kept from writing by the lost mark, and by files that nobody can create a second time (`spark/jvm/CheckpointFiles.scala`).
"""

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

log = structlog.get_logger()

CLAIMS = "claims"
"""The folder of the claims, below the checkpoint."""
BEAT_S = 5.0
EXPIRY_S = 20.0
"""A sign of life that has not changed for so long is that of a process that ended, hangs or is cut off."""
_ALIVE = ".alive"


class CheckpointInUse(Exception):
    """Another process runs a query on this checkpoint."""


class ClaimStore(Protocol):
    """The folder of a checkpoint's claims. Methods block, and raise the store's errors: then it is unknown what they did."""

    def list(self) -> list[str]:
        """All names, as of now."""

    def find(self, name: str) -> bytes | None:
        """None: there is no such file."""

    def exists(self, name: str) -> bool:
        """As of now, whatever this host remembers."""

    def create(self, name: str, content: bytes) -> bool:
        """Create a file, durably; False when it is there with another content. Of many callers at once one gets True."""

    def write(self, name: str, content: bytes) -> None:
        """Create or replace a file."""

    def delete(self, name: str) -> None:
        """Whether it is there or not."""


class SignOfLife(msgspec.Struct, frozen=True, kw_only=True):
    """holder: the object that took the claim. process: as of `process_name`. beat: grows while the holder lives."""

    holder: str
    host: str
    pid: int
    process: str
    beat: int = 0


class Claim:
    """A claim that this process took. Other threads may call its methods."""

    def __init__(self, store: ClaimStore, number: int, token: str, life: SignOfLife) -> None:
        self.number, self.token = number, token
        self._store, self._life = store, life
        self._lost = threading.Event()

    @property
    def mark(self) -> str:
        """The name of the mark."""
        return f"{self.number}-{self.token}"

    @property
    def is_lost(self) -> bool:
        """As of the last check."""
        return self._lost.is_set()

    def check(self) -> None:
        """Ask the store. Raises CheckpointInUse once another process has taken over; the store's errors."""
        if self._lost.is_set() or not self._store.exists(self.mark):
            self._lost.set()
            raise CheckpointInUse("another process has taken over the checkpoint")

    def beat(self) -> None:
        """Change the sign of life, then check the claim. Raises as `check`."""
        self._life = msgspec.structs.replace(self._life, beat=self._life.beat + 1)
        self._store.write(f"{self.number}{_ALIVE}", msgspec.json.encode(self._life))
        self.check()

    def release(self) -> None:
        """Let a successor begin at once. To be called when nothing of this process writes to the checkpoint any more."""
        self._lost.set()
        self._store.delete(self.mark)
        self._store.delete(f"{self.number}{_ALIVE}")


class Claims:
    """Takes claims on one checkpoint for one owner, which holds at most one at a time."""

    def __init__(self, store: ClaimStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._owner = uuid.uuid4().hex
        self._last_sign: tuple[int, bytes] | None = None
        self._since = 0.0

    def acquire(self, above: Callable[[], int] = lambda: 0) -> Claim:
        """Take the claim, if its last holder released it, or shows no sign of life. Raises CheckpointInUse; the store's errors.

        above: gives a number that a former holder had, whatever became of its claim. It sees a silent holder only by calls that
        are EXPIRY_S apart.
        """
        store, last = self._store, _highest(self._store.list())
        if last:
            self._check_silent(last)
        token, number = uuid.uuid4().hex, max(last, above()) + 1
        life = SignOfLife(holder=self._owner, host=socket.gethostname(), pid=os.getpid(), process=process_name())
        store.write(f"{number}{_ALIVE}", msgspec.json.encode(life))  # first: a claim without it counts as released
        if not store.create(str(number), token.encode()):
            raise CheckpointInUse("another process takes it over at this moment")
        # Every lower mark that is in this list goes. One that comes later is given up by its owner, who then sees our claim.
        for name in sorted(store.list(), key=_rank):
            if 0 < _number(name) < number:
                store.delete(name)
        claim = Claim(store, number, token, life)
        store.create(claim.mark, token.encode())
        if _highest(store.list()) != number:
            claim.release()
            raise CheckpointInUse("another process took it over at this moment")
        return claim

    def _check_silent(self, number: int) -> None:
        now = self._clock()  # before the look: time in which this process was frozen makes nobody silent
        found = self._store.find(f"{number}{_ALIVE}")
        if found is None:
            return
        life = _read_life(found)
        if life.holder == self._owner or has_ended(life.process):
            return
        if self._last_sign != (number, found):
            self._last_sign, self._since = (number, found), now
        silent = now - self._since
        if silent < EXPIRY_S:
            raise CheckpointInUse(f"process {life.pid} on {life.host} runs its queries")
        log.warning("checkpoint_holder_silent", host=life.host, process=life.pid, seconds=round(silent))


def _number(name: str) -> int:
    digits = name.removesuffix(_ALIVE).partition("-")[0]
    return int(digits) if digits.isdigit() else 0


def _rank(name: str) -> tuple[bool, int]:
    """Marks first: they let a former holder write."""
    return "-" not in name, _number(name)


def _highest(names: list[str]) -> int:
    """Of the claims. A mark stands for its claim, which somebody may have deleted. A sign of life does not: it comes first."""
    return max((_number(name) for name in names if not name.endswith(_ALIVE)), default=0)


def _read_life(content: bytes) -> SignOfLife:
    """One that somebody damaged is that of a holder who is not known, and may be alive."""
    try:
        return msgspec.json.decode(content, type=SignOfLife)
    except msgspec.DecodeError:
        return SignOfLife(holder="", host="a host that is not known", pid=0, process="")


def process_name(pid: int | None = None) -> str:
    """Names a process, this one by default, as no other process on any machine is named; "" for one that has ended."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = str(Path("/proc/self/ns/pid").readlink())
        stat = Path(f"/proc/{pid or os.getpid()}/stat").read_text()
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else f"{boot} {space} {pid or os.getpid()} {fields[18]}"


def has_ended(process: str) -> bool:
    """Whether a process of this machine has ended; False when it is one of another machine or container, or has no name."""
    boot, _, rest = process.partition(" ")
    space, _, rest = rest.partition(" ")
    pid = rest.partition(" ")[0]
    here = process_name().split(" ")[:2]
    return bool(pid) and [boot, space] == here and process_name(int(pid)) != process


class FolderStore:
    """Claims in a folder that several hosts share. A hard link is made once, on network file systems, too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list(self) -> list[str]:
        return [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []

    def find(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        return self.find(name) is not None  # opened: only that asks the server of a network file system

    def create(self, name: str, content: bytes) -> bool:
        temporary = self._prepare(content)
        try:
            os.link(temporary, self._folder / name)
        except FileExistsError:
            return self.find(name) == content  # NFS may repeat a request whose answer was lost
        finally:
            temporary.unlink()
        return True

    def write(self, name: str, content: bytes) -> None:
        self._prepare(content).replace(self._folder / name)

    def delete(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def _prepare(self, content: bytes) -> Path:
        self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        path = self._folder / f".{uuid.uuid4().hex}.tmp"
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return path


@contextlib.contextmanager
def beating(claim: Claim, name: str, every_s: float | None = None) -> Iterator[None]:
    """Keep the sign of life alive within the block, on a thread; then release the claim. A failed beat is tried again."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(every_s or BEAT_S) and not claim.is_lost:
            try:
                claim.beat()
            except CheckpointInUse:
                log.warning("checkpoint_taken_over", pipe=name, claim=claim.number)
            except Exception as error:  # the store is out of reach: the queries say so, too
                log.warning("checkpoint_sign_of_life_failed", pipe=name, error=str(error)[:200])

    thread = threading.Thread(target=beat, name=f"claim-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(Exception):  # then the successor waits until the sign of life is old
            claim.release()
