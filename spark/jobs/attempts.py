"""A batch that is too much to be computed at once: it is computed in smaller and smaller parts, until the culprits are alone.

A batch is too much when it ends the process (it takes all memory, or never ends), or when its output exceeds the bounds. Nothing
can catch the end of the process. So before such a batch is begun again, a note beside the checkpoint (an **attempt**) says which
part is being computed. The next process finds the note, counts, cuts that part, and continues after the parts that are done.

A batch is cut when it ended two processes: the first end may have had any cause. A part is cut after one. A single event is a
culprit when it ended two, and only when another event of its batch passed: otherwise the transform is broken.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol

import msgspec
import structlog

from spark.brokers.contract import TooMuch
from spark.java import is_answer
from spark.jobs.checkpoint import Checkpoint
from spark.jobs.culprits import Part, TransformBroken, ranges_of
from spark.records import RecordOffset

log = structlog.get_logger()

ATTEMPT_FILE = "attempt.json"
TRIED_FILE = "tried.json"
"""In place of it, for a query in the streaming plan. Its parts that are done were tried, not stored: a query that stores parts,
also one of an earlier version, must never go on behind them."""
PART_OF: Final = "part"
"""Names the output of parts of batches, and their dead letters."""
CUT_INTO = 16
MAX_ENDED: Final = 2
WARM_UP: Final = -1
"""In place of a batch: the run of a transform before its query starts."""
_PARTS_BITS = 20
SETTLE_S = 5.0
"""A pipe waits so long for each process that it ended, except the first. Meanwhile the other pipes of the process work, and those
that ended fewer processes go first."""
MAX_SETTLE_S = 60.0
_POLL_S = 0.1


class Stopping(Exception):
    """Work was not begun, or abandoned, because the job is to stop. The next start does it."""


class Attempt(msgspec.Struct, frozen=True):
    """The progress of a batch that may be too much.

    version: of the pipe's definition; another definition is trusted again, for the parts that are left. parts: not done yet.
    done: the number of parts that are. ended: processes that ended during the first of `parts`; total: during any. working: one
    is being computed now. passed: an event of the batch is known to pass; control: the event that is tried for that.
    """

    batch: int
    version: str
    ended: int = 0
    total: int = 0
    parts: tuple[Part, ...] = ((),)
    done: int = 0
    working: bool = False
    passed: bool = False
    control: RecordOffset | None = None


class Attempts:
    """The attempt of one pipe's batch, over all runs of its query in this process. `current`: None when there is none.

    tries: the query is part of the streaming plan, so parts are only tried. real_time: it plans no batches, so the batch to come
    is the one after the last commit.
    """

    def __init__(self, version: str, *, tries: bool = False, real_time: bool = False) -> None:
        self._version, self._real_time = version, real_time
        self._file = TRIED_FILE if tries else ATTEMPT_FILE
        self._known = False
        self._noted: tuple[Attempt | None, ...] = ()
        """What this process has read or written last. After a failed write: two, of which one is there."""
        self._checkpoint: Checkpoint | None = None
        self.current: Attempt | None = None
        self.why_not_retried: str | None = None
        """The reason why this process does not retry; another process may."""

    @property
    def ended(self) -> int:
        """Processes that are known to have ended during the batch to come."""
        return 0 if self.current is None else self.current.total

    def open(self, checkpoint: Checkpoint) -> None:
        """Before a run. The first call in this process counts: a batch that was begun and not done may have ended a process. So
        does one after another process ran the pipe."""
        self._checkpoint = checkpoint
        found = checkpoint.read_note(self._file, Attempt)
        if self._known and found in self._noted:
            return
        self.current, self.why_not_retried, self._noted = None, None, (found,)
        begun, committed = checkpoint.newest("offsets"), checkpoint.newest("commits")
        pending = begun if begun is not None and begun != committed else WARM_UP
        if pending == WARM_UP and self._real_time:
            pending = _following_batch(committed)
        self._known = True
        if found is not None and found.batch == pending:
            if found.version != self._version:
                self.save(Attempt(pending, self._version, parts=found.parts, done=found.done))
            elif found.working:
                self._count(found)
            elif pending != WARM_UP:
                self.current = found
        elif pending != WARM_UP and not self._real_time:
            self.save(Attempt(pending, self._version, ended=1, total=1))
        if self.ended:
            log.warning(
                "batch_begun_before_and_not_done",
                pipe=checkpoint.path.rpartition("/")[2],
                batch=pending,
                ended_processes=self.ended,
                hint="the process that began the batch ended before the batch was done. The batch is done again",
            )

    def _count(self, found: Attempt) -> None:
        if found.control is not None:
            self.why_not_retried = (
                f"{_describe(found.control)} ends the process, and so does another event of its batch"
            )
            found = msgspec.structs.replace(found, control=None, working=False)
        elif not found.parts:
            self.why_not_retried = f"batch {found.batch} ends the process, and none of its events does by itself"
            found = msgspec.structs.replace(found, working=False)
        else:
            found = msgspec.structs.replace(found, ended=found.ended + 1, working=False)
        self.save(msgspec.structs.replace(found, total=found.total + 1))

    def of(self, batch: int) -> Attempt | None:
        """The attempt of this batch, if there is one."""
        return self.current if self.current is not None and self.current.batch == batch else None

    def begin(self, batch: int) -> Attempt:
        return self.save(Attempt(batch, self._version))

    def save(self, attempt: Attempt) -> Attempt:
        """Write the note, durably."""
        assert self._checkpoint is not None
        self._write(self._checkpoint, attempt)
        self.current = attempt
        return attempt

    def _write(self, checkpoint: Checkpoint, attempt: Attempt) -> None:
        self._noted = (*self._noted[-1:], attempt)
        checkpoint.write_note(self._file, attempt)
        self._noted = (attempt,)

    def record_failure(self, error: BaseException) -> None:
        """The work failed or was stopped. When Java still answers, that is not the end of the process."""
        if self.current is not None and self.current.working and is_answer(error):
            self.save(msgspec.structs.replace(self.current, working=False))

    def record_warm_up(self, checkpoint: Checkpoint, *, begins: bool) -> None:
        """Note that the warm-up begins, which may end the process, or that it is over."""
        self._write(checkpoint, Attempt(WARM_UP, self._version, working=begins))

    def record_working(self) -> None:
        """A query that computes no parts begins the batch to come. Of a real-time query there is always a note."""
        assert self._checkpoint is not None
        if self.current is None and self._real_time:
            self.begin(_following_batch(self._checkpoint.newest("commits")))
        if self.current is not None:
            self.save(msgspec.structs.replace(self.current, working=True))

    def excuse(self) -> None:
        """The process is about to end for a cause that no batch has: its next start does not count this end against one."""
        if self._checkpoint is None:
            return
        found = self._checkpoint.read_note(self._file, Attempt)
        begun, committed = self._checkpoint.newest("offsets"), self._checkpoint.newest("commits")
        if found is not None and found.working:
            self.save(msgspec.structs.replace(found, working=False))
        elif begun is not None and begun != committed and (found is None or found.batch != begun):
            self.save(Attempt(begun, self._version))

    def record_done(self, batch: int) -> None:
        """This batch is done. From now on its note is ignored, because it names a batch before the one to come."""
        if self.current is not None and batch >= self.current.batch:
            self.current = None

    def check(self) -> None:
        """Raise TransformBroken when this process is not to retry."""
        if self.why_not_retried is not None:
            hint = "Try: mending the transform, or a larger PENSTOCK_TRANSFORM_MEMORY (--memory), then starting the service again"
            raise TransformBroken(f"{self.why_not_retried}. {hint}")


def forget_parts(checkpoint: Checkpoint) -> None:
    """When a pipe gets another mode. Its batch begins anew: versions before this one noted parts that were only tried in the same
    file, and real-time mode plans the batch again, with another end."""
    found = checkpoint.read_note(ATTEMPT_FILE, Attempt)
    if found is not None and found.parts != ((),):
        checkpoint.write_note(ATTEMPT_FILE, Attempt(WARM_UP, found.version))


def hand_over_attempt(checkpoint: Checkpoint, version: str) -> bool:
    """Whether the batch to come has ended so many processes in a streaming plan that it must be cut, which only a plan for each
    batch can do. Then its attempt goes on there. To be called before `Attempts.open`."""
    planned, tried = checkpoint.newest("offsets"), checkpoint.read_note(TRIED_FILE, Attempt)
    if tried is None or tried.version != version or planned != tried.batch or planned == checkpoint.newest("commits"):
        return False
    ended = tried.ended + tried.working
    if ended < MAX_ENDED:
        return False
    found = checkpoint.read_note(ATTEMPT_FILE, Attempt)
    if found is None or found.batch != planned:
        checkpoint.write_note(ATTEMPT_FILE, Attempt(planned, version, ended=ended, total=tried.total + tried.working))
    return True


def _following_batch(committed: int | None) -> int:
    return 0 if committed is None else committed + 1


class PartName(NamedTuple):
    """Names a part. epoch: grows from part to part and from batch to batch. mark: the same for the same records."""

    epoch: int
    mark: str


def name_part(batch: int, number: int, part: Part) -> PartName:
    """number: of the part within its batch."""
    text = repr(part).replace("PartRange(", "Range(")  # the text of earlier versions: the name is stored
    return PartName(batch << _PARTS_BITS | number, hashlib.sha256(text.encode()).hexdigest()[:8])


def batch_of(epoch: int) -> int:
    return epoch >> _PARTS_BITS


class PartWork(Protocol):
    """How one kind of query computes parts. Methods raise the errors of reading and writing."""

    def list_records(self, part: Part) -> Sequence[RecordOffset]:
        """The part's records, in order."""

    def is_stored(self, name: PartName | None) -> bool:
        """Whether the output of this part (None: of the whole batch) is stored, as far as the broker knows."""

    def compute(self, part: Part, name: PartName | None) -> bool:
        """Compute and store the part durably; whether an event of it passed. name: None for a whole batch.

        Raises TooMuch; TransformBroken.
        """

    def passes(self, record: RecordOffset) -> bool:
        """Whether the transform passes this event by itself. Stores nothing."""

    def reject(self, record: RecordOffset, reason: str) -> None:
        """Write this event to the dead letters, durably, and report it. Raises TransformBroken."""


class PartRunner:
    """Computes the parts of one batch, one after the other."""

    def __init__(self, attempts: Attempts, work: PartWork, check_not_stopping: Callable[[], None]) -> None:
        self._attempts, self._work, self._check_not_stopping = attempts, work, check_not_stopping

    def run(self, batch: int, too_much: str = "") -> None:
        """Until the batch is done. too_much: why the whole batch was too much. After an error the next call continues there."""
        attempts = self._attempts
        attempt = attempts.of(batch) or attempts.begin(batch)
        try:
            if too_much:
                attempt = self._cut(attempt, too_much)
            while attempt.parts:
                self._check_not_stopping()
                attempt = self._step(attempt)
        except BaseException as error:
            attempts.record_failure(error)
            raise

    def _step(self, attempt: Attempt) -> Attempt:
        part, save = attempt.parts[0], self._attempts.save
        name = name_part(attempt.batch, attempt.done, part) if part else None
        limit = MAX_ENDED if not part or _is_single(part) else 1
        # A stored part is computed again unchanged: cut, its parts would have other names, and be stored a second time.
        if attempt.ended >= limit and not self._work.is_stored(name):
            ended = f"it ended the process {attempt.ended} times: it takes all memory, or never ends"
            return self._cut(attempt, ended)
        attempt = save(msgspec.structs.replace(attempt, working=True))
        try:
            passed = self._work.compute(part, name)
        except TooMuch as error:
            return self._cut(attempt, str(error))
        return save(_next_part(attempt, passed=attempt.passed or passed))

    def _cut(self, attempt: Attempt, reason: str) -> Attempt:
        records = self._work.list_records(attempt.parts[0])
        if len(records) <= 1:
            return self._reject(attempt, records, reason)
        size = -(-len(records) // CUT_INTO)
        cut = tuple(ranges_of(records[at : at + size]) for at in range(0, len(records), size))
        log.warning("batch_in_parts", batch=attempt.batch, events=len(records), parts=len(cut), reason=reason)
        parts = (*cut, *attempt.parts[1:])
        return self._attempts.save(msgspec.structs.replace(attempt, parts=parts, ended=0, working=False))

    def _reject(self, attempt: Attempt, records: Sequence[RecordOffset], reason: str) -> Attempt:
        """One event is left. It is the culprit if another one passes."""
        for record in records:
            attempt = self._find_one_that_passes(attempt, record)
            self._work.reject(record, reason)
        return self._attempts.save(_next_part(attempt, passed=attempt.passed))

    def _find_one_that_passes(self, attempt: Attempt, suspect: RecordOffset) -> Attempt:
        others = [record for record in self._work.list_records(()) if record != suspect]
        if attempt.passed or not others:
            return attempt
        save, other = self._attempts.save, others[-1]
        attempt = save(msgspec.structs.replace(attempt, control=other, working=True))
        try:
            passes = self._work.passes(other)
        except TooMuch:
            passes = False
        if not passes:
            raise TransformBroken(f"it fails on {_describe(suspect)}, and on {_describe(other)}, too")
        return save(msgspec.structs.replace(attempt, control=None, working=False, passed=True))


def _next_part(attempt: Attempt, *, passed: bool) -> Attempt:
    return msgspec.structs.replace(
        attempt, parts=attempt.parts[1:], done=attempt.done + 1, ended=0, working=False, passed=passed
    )


def _is_single(part: Part) -> bool:
    return len(part) == 1 and part[0].first == part[0].last


def _describe(record: RecordOffset) -> str:
    return f"{record.topic}[{record.partition}] at {int(record.offset)}"


class SuspectLock:
    """Shared by all pipes of a process: one suspected pipe at a time retries a batch that ended processes.

    So the pipe that ends the next process is known.
    """

    def __init__(self, settle_s: float = SETTLE_S) -> None:
        self._settle_s = settle_s
        self._free = threading.Lock()

    @contextmanager
    def acquire(self, ended: int, is_stopping: Callable[[], bool]) -> Iterator[Callable[[], None]]:
        """Wait for the turn of a pipe that ended this number of processes. Yields a function that releases the lock early.

        A single end may have had any cause: then the pipe neither waits nor locks. Raises Stopping.
        """
        held = False

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._free.release()

        if ended > 1:
            ready_at = time.monotonic() + min(MAX_SETTLE_S, (ended - 1) * self._settle_s)
            while time.monotonic() < ready_at or not self._free.acquire(timeout=_POLL_S):
                if is_stopping():
                    raise Stopping
                time.sleep(_POLL_S)
            held = True
        try:
            yield release
        finally:
            release()
