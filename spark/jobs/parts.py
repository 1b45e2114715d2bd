"""A batch that is too much for one go: computed in ever smaller parts, until the events that are to blame are alone.

Too much is what ends the process (all memory taken, a transform that never ends), or what gives more output than a batch may.
The end of the process cannot be caught: so before such a batch is begun again, a note beside the checkpoint (an **attempt**) says
which part is at work. The next process counts what it finds there, cuts that part, and goes on behind what is done.

A batch is cut when it ended two processes: the first may have been killed by anybody. A part is cut at once; an event by itself
is to blame when it ended two, and only when another event of its batch passed: else the transform is broken.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec
import structlog

from spark.checkpoint import Checkpoint
from spark.errors import is_answer
from spark.jobs.culprits import TransformBroken
from spark.place import Place

log = structlog.get_logger()

ATTEMPT_FILE = "attempt.json"
PART_OF: Final = "part"
"""Names the output of parts of batches, and their dead letters."""
CUT_INTO = 16
MOST_ENDED: Final = 2
WARM_UP: Final = -1
"""Stands for a batch: the run of a transform before its query starts."""
_PARTS_BITS = 20


class TooMuch(Exception):
    """The output is larger than a batch's may be. Nothing of it was written."""


class Range(NamedTuple):
    """Records of one partition, from the first to the last of these offsets (texts, as in `Place`)."""

    topic: str
    partition: int
    first: str
    last: str


Part = tuple[Range, ...]
"""In the order in which it is read. Empty: the whole batch."""


class Attempt(msgspec.Struct, frozen=True):
    """How far a batch is that may be too much. version: of the pipe's definition; another one is trusted anew, for what is left.

    parts: still to be done, and done: how many are. ended: processes that ended while they were at work on the first of `parts`;
    total: on any of them. working: one is at work now. passed: an event of the batch is known to pass; control: the one that is
    tried for that.
    """

    batch: int
    version: str
    ended: int = 0
    total: int = 0
    parts: tuple[Part, ...] = ((),)
    done: int = 0
    working: bool = False
    passed: bool = False
    control: Place | None = None


class Attempts:
    """The attempt of one pipe's batch, over all runs of its query in this process. `current`: None when there is none."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._known = False
        self._checkpoint: Checkpoint | None = None
        self.current: Attempt | None = None
        self.held: str | None = None
        """Why this process does not try again; another one may."""

    @property
    def ended(self) -> int:
        """Processes that the batch to come, or a part of it, has ended, as far as is known."""
        return 0 if self.current is None else self.current.total

    def open(self, checkpoint: Checkpoint) -> None:
        """Before a run. The first one in this process counts: what is begun and not done, a process that has ended had begun."""
        self._checkpoint = checkpoint
        if self._known:
            return
        begun, found = checkpoint.newest("offsets"), checkpoint.read_note(ATTEMPT_FILE, Attempt)
        pending = begun if begun is not None and begun != checkpoint.newest("commits") else WARM_UP
        self._known = True
        if found is not None and found.batch == pending:
            if found.version != self._version:
                self.save(Attempt(pending, self._version, parts=found.parts, done=found.done))
            elif found.working:
                self._count(found)
            elif pending != WARM_UP:
                self.current = found
        elif pending != WARM_UP:
            self.save(Attempt(pending, self._version, ended=1, total=1))
        if self.ended:
            log.warning("a batch was begun before and not done", batch=pending, ended_processes=self.ended)

    def _count(self, found: Attempt) -> None:
        if found.control is not None:
            self.held = f"{_describe(found.control)} ends the process, and so does another event of its batch"
            found = msgspec.structs.replace(found, control=None, working=False)
        elif not found.parts:
            self.held = f"batch {found.batch} ends the process, and none of its events does by itself"
            found = msgspec.structs.replace(found, working=False)
        else:
            found = msgspec.structs.replace(found, ended=found.ended + 1, working=False)
        self.save(msgspec.structs.replace(found, total=found.total + 1))

    def of(self, batch: int) -> Attempt | None:
        """The attempt of this batch, if there is one."""
        return self.current if self.current is not None and self.current.batch == batch else None

    def begin(self, batch: int) -> Attempt:
        """A new attempt."""
        return self.save(Attempt(batch, self._version))

    def save(self, attempt: Attempt) -> Attempt:
        """Note it, durably."""
        assert self._checkpoint is not None
        self._checkpoint.write_note(ATTEMPT_FILE, attempt)
        self.current = attempt
        return attempt

    def leave(self, error: BaseException) -> None:
        """What was at work failed. When Java still answers, that is not the end of the process."""
        if self.current is not None and self.current.working and is_answer(error):
            self.save(msgspec.structs.replace(self.current, working=False))

    def warming_up(self, checkpoint: Checkpoint, *, begins: bool) -> None:
        """Note that what follows may end the process, or that it did not."""
        checkpoint.write_note(ATTEMPT_FILE, Attempt(WARM_UP, self._version, working=begins))

    def set_working(self) -> None:
        """What the attempt is of is begun, by a query that does not do it in parts."""
        if self.current is not None:
            self.save(msgspec.structs.replace(self.current, working=True))

    def done(self, batch: int) -> None:
        """This batch is done. Its note is passed over from now on, since it names another batch than the one to come."""
        if self.current is not None and batch >= self.current.batch:
            self.current = None

    def check(self) -> None:
        """Raise TransformBroken when this process is not to try again."""
        if self.held is not None:
            hint = "Try: mending the transform, or more --memory, then starting the service again"
            raise TransformBroken(f"{self.held}. {hint}")


class PartName(NamedTuple):
    """Names a part. epoch: grows from part to part and from batch to batch. mark: the same for the same records."""

    epoch: int
    mark: str


def part_name(batch: int, number: int, part: Part) -> PartName:
    """number: of the part within its batch."""
    return PartName(batch << _PARTS_BITS | number, hashlib.sha256(repr(part).encode()).hexdigest()[:8])


def batch_of(epoch: int) -> int:
    """The batch of a part."""
    return epoch >> _PARTS_BITS


class PartWork(Protocol):
    """What is done with each part. Methods raise what reading and writing raise."""

    def places(self, part: Part) -> Sequence[Place]:
        """Its records, in order."""

    def is_stored(self, name: PartName | None) -> bool:
        """Whether the output of this part (None: of the whole batch) is stored already, as far as the broker knows."""

    def compute(self, part: Part, name: PartName | None) -> bool:
        """Do everything that the part asks for, durably; whether an event of it passed. name: None of a whole batch.

        Raises TooMuch; TransformBroken.
        """

    def passes(self, place: Place) -> bool:
        """Whether the transform takes this event by itself. Writes nothing."""

    def condemn(self, place: Place, why: str, name: PartName) -> None:
        """Send this event to the dead letters, durably, and tell of it. Raises TransformBroken."""


class PartByPart:
    """Does the parts of one batch, one after the other."""

    def __init__(self, attempts: Attempts, work: PartWork, check_not_stopping: Callable[[], None]) -> None:
        self._attempts, self._work, self._check_not_stopping = attempts, work, check_not_stopping

    def run(self, batch: int, too_much: str = "") -> None:
        """Until the batch is done. too_much: why the whole of it was found to be. Raises what the work raises; then it goes on
        there the next time."""
        attempts = self._attempts
        attempt = attempts.of(batch) or attempts.begin(batch)
        try:
            if too_much:
                attempt = self._cut(attempt, too_much)
            while attempt.parts:
                self._check_not_stopping()
                attempt = self._step(attempt)
        except BaseException as error:
            attempts.leave(error)
            raise

    def _step(self, attempt: Attempt) -> Attempt:
        part, save = attempt.parts[0], self._attempts.save
        name = part_name(attempt.batch, attempt.done, part) if part else None
        limit = MOST_ENDED if not part or _is_single(part) else 1
        # What is stored is done again as it was: cut, it would have other names, and be stored twice.
        if attempt.ended >= limit and not self._work.is_stored(name):
            ended = f"it ended the process {attempt.ended} times: it takes all memory, or never ends"
            return self._cut(attempt, ended)
        attempt = save(msgspec.structs.replace(attempt, working=True))
        try:
            passed = self._work.compute(part, name)
        except TooMuch as error:
            return self._cut(attempt, str(error))
        return save(_following(attempt, passed=attempt.passed or passed))

    def _cut(self, attempt: Attempt, why: str) -> Attempt:
        places = self._work.places(attempt.parts[0])
        if len(places) <= 1:
            return self._end_with(attempt, places, why)
        size = -(-len(places) // CUT_INTO)
        cut = tuple(ranges_of(places[at : at + size]) for at in range(0, len(places), size))
        log.warning("batch in parts", batch=attempt.batch, events=len(places), parts=len(cut), why=why)
        parts = (*cut, *attempt.parts[1:])
        return self._attempts.save(msgspec.structs.replace(attempt, parts=parts, ended=0, working=False))

    def _end_with(self, attempt: Attempt, places: Sequence[Place], why: str) -> Attempt:
        """One event is left, and it is to blame if another one passes."""
        save = self._attempts.save
        for place in places:
            attempt = self._find_one_that_passes(attempt, place)
            name = part_name(attempt.batch, attempt.done, ranges_of([place]))
            self._work.condemn(place, why, name)
        return save(_following(attempt, passed=attempt.passed))

    def _find_one_that_passes(self, attempt: Attempt, suspect: Place) -> Attempt:
        others = [place for place in self._work.places(()) if place != suspect]
        if attempt.passed or not others:
            return attempt
        save, other = self._attempts.save, others[-1]
        attempt = save(msgspec.structs.replace(attempt, control=other, working=True))
        if not self._work.passes(other):
            raise TransformBroken(f"it fails on {_describe(suspect)}, and on {_describe(other)}, too")
        return save(msgspec.structs.replace(attempt, control=None, working=False, passed=True))


def _following(attempt: Attempt, *, passed: bool) -> Attempt:
    return msgspec.structs.replace(
        attempt, parts=attempt.parts[1:], done=attempt.done + 1, ended=0, working=False, passed=passed
    )


def _is_single(part: Part) -> bool:
    return len(part) == 1 and part[0].first == part[0].last


def _describe(place: Place) -> str:
    return f"{place.topic}[{place.partition}] at {int(place.offset)}"


def ranges_of(places: Sequence[Place]) -> Part:
    """Of places in order."""
    found: dict[tuple[str, int], Range] = {}
    for topic, partition, offset in places:
        known = found.get((topic, partition))
        found[topic, partition] = Range(topic, partition, known.first if known else offset, offset)
    return tuple(found.values())


def within(part: Part) -> str:
    """A SQL condition on raw columns: what lies in this part."""
    texts = [f"(topic = '{t}' AND partition = {p} AND offset BETWEEN '{a}' AND '{b}')" for t, p, a, b in part]
    return " OR ".join(texts) or "true"
