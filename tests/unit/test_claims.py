"""Claims on a checkpoint, driven at random: real claims, on a store that behaves as S3 does, with all the faults of its users.

A driver is a thread that takes the claim, and then plans and finishes batches as Spark does through `CheckpointFiles.scala`,
whose rule is in `Driver._write`. One request is made at a time, and chance decides whose. Between two of them a driver may be
frozen for minutes, may be killed, or may lose the answer of a request that was carried out. The AWS SDK repeats such a request.
"""

import os
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from spark.jobs.checkpoint import _take_over_notes
from spark.jobs.claims import EXPIRY_S, CheckpointInUse, Claim, Claims, FolderStore, beating, has_ended, process_name


class Killed(BaseException):
    """The process of this driver has ended."""


class NoAnswerError(Exception):
    """The client gave up. The request may have been carried out."""


class World:
    """The objects of all drivers, and chance. Requests are atomic."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.objects: dict[str, str] = {}
        self.outputs: set[tuple[str, str]] = set()
        self.late: Counter[int] = Counter()
        """Files that the holder of a claim created after another one had begun."""
        self.working = 0
        """The newest claim whose holder has begun."""
        self.lost = 0.05
        """The probability that an answer is lost."""
        self.drivers = [Driver(self) for _ in range(3)]

    def run(self, steps: int, *, faults: bool = True) -> None:
        for _ in range(steps):
            self.now += self.chance.choice((0.0, 0.1, 1.0))
            awake = [driver for driver in self.drivers if driver.frozen_until <= self.now]
            if not awake:
                self.now += 1
                continue
            driver = self.chance.choice(awake)
            if faults and self.chance.random() < 0.02:
                driver.frozen_until = self.now + self.chance.choice((3.0, 30.0, 120.0))
            elif faults and self.chance.random() < 0.01:
                driver.kill()
                self.drivers[self.drivers.index(driver)] = Driver(self)
            else:
                driver.turn()
                self.check()

    def check(self) -> None:
        """Files are created once by the store itself. So this is what must hold besides."""
        holders = [driver.claim.number for driver in self.drivers if driver.claim and driver.holds]
        assert len(holders) <= 1, f"two processes hold the checkpoint: {holders}"
        assert not self.late or max(self.late.values()) <= 1, f"a replaced holder went on: {self.late}"

    def check_batches(self) -> int:
        """Every event is in one batch, and each finished batch is stored. Returns the number of finished batches."""
        end, done = 0, 0
        for batch in range(self.newest("offsets") + 1):
            first, last = map(int, self.objects[f"offsets/{batch}"].split("-"))
            assert first == end, f"batch {batch} begins at {first}, the one before ended at {end}"
            end = last
            if f"commits/{batch}" in self.objects:
                assert (f"offsets/{batch}", f"{first}-{last}") in self.outputs, f"batch {batch} was not stored"
                done += 1
        return done

    def newest(self, folder: str) -> int:
        return max((int(n.partition("/")[2]) for n in self.objects if n.startswith(f"{folder}/")), default=-1)


class Driver:
    """A process that runs the pipe."""

    def __init__(self, world: World) -> None:
        self.world, self.frozen_until = world, 0.0
        self.claim: Claim | None = None
        self._killed, self._beat_at = False, 0.0
        self._mine, self._worlds = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    @property
    def holds(self) -> bool:
        return self.claim is not None and f"claims/{self.claim.mark}" in self.world.objects

    def turn(self) -> None:
        """Up to the next request."""
        self._mine.release()
        assert self._worlds.acquire(timeout=600)

    def kill(self) -> None:
        self._killed = True
        self._mine.release()
        self._thread.join(60)

    def request(self) -> bool:
        """Wait for the turn. Returns whether the answer to this request will be lost."""
        self._worlds.release()
        self._mine.acquire()
        if self._killed:
            raise Killed
        return self.world.chance.random() < self.world.lost

    def _live(self) -> None:
        self._mine.acquire()
        claims = Claims(Requests(self), lambda: self.world.now)
        try:
            while not self._killed:
                try:
                    claim = claims.acquire()
                    self.claim = claim
                    self.world.working = max(self.world.working, claim.number)
                    self._work(claim)
                    claim.release()
                except (CheckpointInUse, NoAnswerError):
                    self.request()
        except Killed:
            return

    def _work(self, claim: Claim) -> None:
        """Until a file is refused: then the query ends."""
        world, planned = self.world, self.world.newest("offsets")
        batch = planned + 1 if planned < 0 or f"commits/{planned}" in world.objects else planned
        for _ in range(6):
            if world.now > self._beat_at:
                self._beat_at = world.now + 5
                claim.beat()
            if f"offsets/{batch}" not in world.objects:
                end = int(world.objects.get(f"offsets/{batch - 1}", "0-0").partition("-")[2])
                if not self._write(claim, f"offsets/{batch}", f"{end}-{end + world.chance.randrange(1, 99)}"):
                    return
            self.request()
            world.outputs.add((f"offsets/{batch}", world.objects[f"offsets/{batch}"]))
            if not self._write(claim, f"commits/{batch}", "done"):
                return
            batch += 1

    def _write(self, claim: Claim, name: str, content: str) -> bool:
        """As `OnceStream` and `Once`: ask for the claim, then create."""
        claim.check()
        return self.create(name, content, claim.number)

    def create(self, name: str, content: str, number: int = 0) -> bool:
        """Twice, when no answer came. Then the file may be there, and ours."""
        lost = self.request()
        if name not in self.world.objects and 0 < number < self.world.working:
            self.world.late[number] += 1
        self.world.objects.setdefault(name, content)
        if lost:
            self.request()
        return self.world.objects[name] == content


class Requests:
    """The ClaimStore of a driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._objects = driver, driver.world.objects

    def list(self) -> list[str]:
        self._driver.request()
        return [name.removeprefix("claims/") for name in self._objects if name.startswith("claims/")]

    def find(self, name: str) -> bytes | None:
        self._driver.request()
        found = self._objects.get(f"claims/{name}")
        return None if found is None else found.encode()

    def exists(self, name: str) -> bool:
        return self.find(name) is not None

    def create(self, name: str, content: bytes) -> bool:
        return self._driver.create(f"claims/{name}", content.decode())

    def write(self, name: str, content: bytes) -> None:
        lost = self._driver.request()
        self._objects[f"claims/{name}"] = content.decode()
        if lost:
            raise NoAnswerError

    def delete(self, name: str) -> None:
        lost = self._driver.request()
        self._objects.pop(f"claims/{name}", None)
        if lost:
            raise NoAnswerError


@pytest.mark.parametrize("first", range(0, 160, 40))
def test_one_process_plans_and_finishes_batches(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, two processes run one pipe, a replaced one goes on, or nobody runs it once all is well again."""
    monkeypatch.setattr("spark.jobs.claims.has_ended", lambda _process: False)  # all of them are this process
    replaced = 0
    for seed in range(first, first + 40):
        world = World(seed)
        try:
            world.run(400)
            done = world.check_batches()
            replaced += world.working
            world.lost, world.now = 0.0, world.now + 121.0
            world.run(300, faults=False)
            assert world.check_batches() > done, "nobody runs the pipe"
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finally:
            for driver in world.drivers:
                driver.kill()
    assert replaced > 100, "too few takeovers to mean anything"


def take(folder: Path, clock: float = 0.0) -> Claim:
    return Claims(FolderStore(folder), lambda: clock).acquire()


def test_a_holder_is_replaced_when_it_is_silent(tmp_path: Path) -> None:
    """If this fails, a standby replaces a process that works, or none that hangs; or waits for one that ended in order."""
    now = 0.0
    held, others = take(tmp_path), Claims(FolderStore(tmp_path), lambda: now)
    for _ in range(3):
        now += EXPIRY_S - 1
        with pytest.raises(CheckpointInUse, match=f"process {os.getpid()} on "):
            others.acquire()
        held.beat()
    now += 1
    with pytest.raises(CheckpointInUse):
        others.acquire()
    now += EXPIRY_S
    second = others.acquire()
    with pytest.raises(CheckpointInUse, match="another process has taken over"):
        held.beat()
    assert held.is_lost
    second.check()
    second.release()
    third = take(tmp_path)
    assert (held.number, second.number, third.number) == (1, 2, 3)


def test_files_that_somebody_deleted_or_damaged(tmp_path: Path) -> None:
    """If this fails, an operator who cleans up makes two processes run one pipe, or a damaged file stops it for ever."""
    now = 0.0
    held, others = take(tmp_path), Claims(FolderStore(tmp_path), lambda: now)
    (tmp_path / "1").unlink()
    for _ in range(2):
        now += EXPIRY_S - 1
        with pytest.raises(CheckpointInUse, match=f"process {os.getpid()} on "):
            others.acquire()
        held.beat()
    (tmp_path / "1.alive").write_bytes(b"")
    with pytest.raises(CheckpointInUse, match="not known"):
        others.acquire()
    now += EXPIRY_S
    second = others.acquire()
    with pytest.raises(CheckpointInUse):
        held.check()
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(CheckpointInUse):
        second.check()
    third = Claims(FolderStore(tmp_path)).acquire(above=lambda: 2)
    assert (second.number, third.number) == (2, 3), "its notes are in a folder of that number"


def test_a_process_that_ended_is_replaced_at_once(tmp_path: Path) -> None:
    """If this fails, a transform that was killed starts again only after a time-out, on the same machine, too."""
    code = f"from pathlib import Path; from spark.jobs.claims import *; Claims(FolderStore(Path({str(tmp_path)!r}))).acquire()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert take(tmp_path).number == 2
    assert not has_ended(process_name())
    assert not has_ended("")
    assert not has_ended(process_name().replace("pid:", "other:"))
    assert has_ended(f"{process_name()}1")


def test_the_sign_of_life_changes_within_the_block(tmp_path: Path) -> None:
    """If this fails, each holder is replaced by the next standby, over and over; or one that ended in order is waited for."""
    store = FolderStore(tmp_path)
    claim = Claims(store).acquire()
    first, changed = store.find("1.alive"), threading.Event()
    with beating(claim, "p", 0.01):
        while store.find("1.alive") == first:
            assert not changed.wait(0.01)
    assert store.list() == ["1"]


class Files:
    """Objects as `HadoopFolder` shows them. after: requests until the process ends."""

    def __init__(self, files: dict[str, bytes], after: int = 1000) -> None:
        self.files, self._after = files, after

    def _count(self) -> None:
        self._after -= 1
        if self._after < 0:
            raise NoAnswerError

    def list(self, name: str) -> list[str]:
        below = [path.removeprefix(f"{name}/" if name else "") for path in self.files if path.startswith(name)]
        return sorted({path.partition("/")[0] for path in below})

    def exists(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str) -> bytes:
        return self.files[name]

    def write(self, name: str, content: bytes) -> None:
        self._count()
        self.files[name] = content

    def delete(self, name: str) -> None:
        self._count()
        for path in [path for path in self.files if path.startswith(f"{name}/")]:
            del self.files[path]


@pytest.mark.parametrize("place", ["", "notes/3/"])
def test_notes_are_taken_over_whole_or_not_at_all(place: str) -> None:
    """If this fails, a crash during a takeover loses a note, or a replaced holder changes the notes of its successor."""
    names = ("attempt.json", "penstock.json", "skipped.json")
    for after in range(6):
        files = {f"{place}{name}": name.encode() for name in names} | {"metadata": b"Spark's"}
        try:
            _take_over_notes(Files(files, after), 7)  # type: ignore[arg-type]
        except NoAnswerError:
            files[f"{place}attempt.json"] = b"late"
        _take_over_notes(Files(files), 8)  # type: ignore[arg-type]
        late = b"late" if "notes/7/penstock.json" not in files and after < 3 else b"attempt.json"
        files[f"{place}attempt.json"] = b"later"
        assert {name: files[f"notes/8/{name}"] for name in names} == {name: name.encode() for name in names} | {
            "attempt.json": late
        }, after
        assert "notes/8/metadata" not in files
