"""Decides where a transform begins after it was reset to a time.

The reset left the offsets of that time in the transform's mark. If the position of the former checkpoint in a partition comes
first, the transform begins at this position, so it passes over no event that it has not read. The position is not known without a
former checkpoint, and in a topic that was created again. Then the transform begins at the time, and leaves out older stored
events. It logs and counts these events, and events that retention has removed.

The beginning is noted for each partition, also if it is the oldest record. Otherwise retention could remove records between the
start and the first batch, and nobody would notice.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog
from pyspark.sql import SparkSession

from services.core.control.transform_marks import TransformMark
from services.core.metrics import TRANSFORM_LEFT_OUT
from spark.brokers.contract import SparkBroker
from spark.java import JAVA_ERRORS
from spark.jobs.checkpoint import Checkpoint, CheckpointDamaged, Identity, peek_checkpoint
from spark.jobs.modes import MODE_FILE, PER_BATCH
from spark.jobs.open_batches import REJECTED_FILE, REPORTED_FILE, UpTo
from spark.jobs.replay import REJECTS
from spark.records import Offsets

log = structlog.get_logger()

_LEFT_OUT = {
    "before_time": "these stored events are older than the time; it is not known whether they were transformed before",
    "gone": "retention removed these events; if the former position is not known, some may have been transformed before",
}


@dataclass(frozen=True, slots=True)
class Beginning:
    """begins: the offsets where a new checkpoint begins, for `Identity.begins`; empty without a reset to a time. left_out: events
    by reason and topic. by: the user who reset the transform. former: the name of the former checkpoint; "" without one."""

    begins: dict[str, dict[int, int]] = field(default_factory=dict)
    left_out: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    by: str = ""
    former: str = ""

    def record(self, pipe: str) -> None:
        """Log the beginning, and count the events that were left out. Call it once, when the checkpoint is stored: a start that
        fails before that is repeated."""
        if self.begins:
            log.info("begins_at_a_time", pipe=pipe, begins=self.begins, by=self.by, former=self.former)
        for reason, events in self.left_out.items():
            if found := {topic: number for topic, number in events.items() if number}:
                TRANSFORM_LEFT_OUT.labels(pipe, reason).inc(sum(found.values()))
                hint = f"{_LEFT_OUT[reason]}; docs/transforms.md"
                log.warning("events_left_out", pipe=pipe, reason=reason, events=found, hint=hint)


def find_begins(
    session: SparkSession,
    root: str,
    broker: SparkBroker,
    identity: Identity,
    mark: TransformMark | None,
    *,
    ledger: bool = True,
) -> Beginning:
    """Where a new checkpoint begins.

    root: the folder of all checkpoints. identity: of the new one. ledger: whether reports have sets of origins. Raises
    CheckpointDamaged when offsets are of another topic or behind its end, when the former checkpoint is gone or of another pipe,
    and when it or this transform keeps state: results would lack what came before. Raises UnknownTopic, Unavailable.
    """
    if mark is None or not mark.begins:
        return Beginning()
    if identity.state:
        raise CheckpointDamaged(
            f"the transform of {identity.pipe} keeps state over several events, so it cannot begin at a time: its first results "
            f"would lack what came before. Try: penstock group reset {identity.pipe} --to-earliest"
        )
    chosen = _chosen(broker, identity, mark)
    known, done = _position(session, root, broker, identity, mark.former, ledger=ledger)
    begins: dict[str, dict[int, int]] = {}
    before_time, gone = Counter[str](), Counter[str]()
    for topic, partition, start, end in broker.stored_ranges(session, sorted(identity.topics)):
        begin, place = chosen.get(topic, {}).get(partition, start), (topic, partition)
        if (furthest := max(begin, done.get(place, begin))) > end:
            raise CheckpointDamaged(
                f"{identity.pipe} has offset {furthest} of {topic}:{partition} from its reset or its former checkpoint, but the "
                f"partition ends at {end}: records were lost, and new records may have got their offsets. Try: penstock group "
                f"reset {identity.pipe} --to-earliest"
            )
        gone[topic] += max(0, start - done.get(place, begin))
        if known is None or known.get(topic, identity.topics[topic]) != identity.topics[topic]:
            before_time[topic] += max(0, begin - start)
        else:  # a source or a partition that the former transform did not read begins at its oldest record
            begin = min(begin, done.get(place, start))
        begins.setdefault(topic, {})[partition] = max(begin, start)
    return Beginning(begins, {"before_time": before_time, "gone": gone}, mark.by, mark.former)


def _chosen(broker: SparkBroker, identity: Identity, mark: TransformMark) -> dict[str, dict[int, int]]:
    """The offsets of the time in the topics that are still sources. A source that was added since begins at its oldest record."""
    found = {topic: begin for topic, begin in mark.begins.items() if topic in identity.topics}
    for topic, begin in found.items():
        if broker.identity_of(begin.incarnation) != identity.topics[topic]:
            raise CheckpointDamaged(
                f"topic {topic!r} was deleted and created again since {identity.pipe} was reset to a time. Try: penstock group "
                f"reset {identity.pipe} with --to or --to-earliest"
            )
    return {topic: begin.offsets for topic, begin in found.items()}


def _position(
    session: SparkSession, root: str, broker: SparkBroker, identity: Identity, name: str, *, ledger: bool
) -> tuple[dict[str, str] | None, Offsets]:
    """The identities of the topics that the former transform knew, and its position in those that are the same. None: there is no
    former checkpoint."""
    if not name:
        return None, {}
    former, again = peek_checkpoint(session, root, name), f"penstock group reset {identity.pipe} --to-earliest"
    try:
        before = former.read_identity()
        if before is not None and before.ran and former.newest("offsets") is None:
            raise former.damaged("its offsets are gone")
        former.check_readable()
        done = {} if before is None else _settled(before, former, broker, ledger=ledger)
    except (CheckpointDamaged, *JAVA_ERRORS) as error:
        raise CheckpointDamaged(
            f"{former.path}, the former checkpoint of {identity.pipe}, cannot be read. Try: {again}"
        ) from error
    if before is None:
        raise CheckpointDamaged(
            f"{former.path}, the former checkpoint of {identity.pipe}, is gone. {identity.pipe} needs its position, in order to "
            f"pass over no event. Try: moving the checkpoint back; or {again}"
        )
    if before.pipe != identity.pipe:
        raise CheckpointDamaged(
            f"{former.path} belongs to the pipe {before.pipe!r}, not {identity.pipe!r}: its position cannot be used. Try: {again}"
        )
    if before.state or before.plan is not None or (not before.penstock and former.has_state()):
        raise CheckpointDamaged(
            f"the former transform of {identity.pipe} kept state over several events, which would be lost. Try: {again}"
        )
    same = {topic for topic, found in before.topics.items() if identity.topics.get(topic) == found}
    return before.topics, {place: offset for place, offset in done.items() if place[0] in same}


def _settled(before: Identity, former: Checkpoint, broker: SparkBroker, *, ledger: bool) -> Offsets:
    """The position up to which everything is done. The events before it are committed. In a streaming plan, reports and bad
    records follow the commit, so these must be done, too."""
    done = former.committed_offsets(broker.parse_offsets)
    mode = former.read_note(MODE_FILE, str) or ("micro-batch" if before.kind == PER_BATCH else "")
    if mode == "micro-batch":
        return done
    for name in (REPORTED_FILE, REJECTED_FILE) if ledger else (REJECTED_FILE,):
        note = former.read_note(name, UpTo)
        if note is not None:
            done = _lower(done, note.offsets())
        elif name == REJECTED_FILE and (former_rejects := former.beside(REJECTS)).newest("commits") is not None:
            done = _lower(done, former_rejects.committed_offsets(broker.parse_offsets))  # of an earlier version
    return done


def _lower(one: Offsets, other: Offsets) -> Offsets:
    return {place: min(offset, other[place]) for place, offset in one.items() if place in other}
