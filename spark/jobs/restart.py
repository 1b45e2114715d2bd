"""Where a transform begins that was reset to a time.

The reset left the offsets of that time in the transform's mark. It must not pass over an event that the transform has not read.
So a partition begins at its position in the former checkpoint, if that comes first.
"""

from collections.abc import Mapping

import structlog
from pyspark.sql import SparkSession

from services.core.transform_marks import TransformMark
from spark.brokers.contract import SparkBroker
from spark.java import JAVA_ERRORS
from spark.jobs.checkpoint import Checkpoint, CheckpointDamaged, Identity, peek_checkpoint
from spark.jobs.modes import MODE_FILE, PER_BATCH
from spark.jobs.open_batches import REJECTED_FILE, REPORTED_FILE, UpTo
from spark.jobs.replay import REJECTS
from spark.records import Begins, Offsets

log = structlog.get_logger()


def find_begins(
    session: SparkSession,
    root: str,
    broker: SparkBroker,
    identity: Identity,
    mark: TransformMark | None,
    *,
    ledger: bool = True,
) -> Begins:
    """For the first batch of a new checkpoint, by topic; empty without a reset to a time. A partition that is not in it begins at
    its oldest record.

    root: the folder of all checkpoints. identity: of the new one. ledger: whether reports have sets of origins. Raises
    CheckpointDamaged when the offsets are of another topic, when the former checkpoint is gone, and when it or this
    transform keeps state: results would lack what came before.
    """
    if mark is None or not mark.begins:
        return {}
    earliest = f"Try: penstock group reset {identity.pipe} --to-earliest"
    if identity.state:
        raise CheckpointDamaged(
            f"the transform of {identity.pipe} keeps state over several events, so it cannot begin at a time: its first results "
            f"would lack what came before. {earliest}"
        )
    begins: dict[str, dict[int, int]] = {}
    for topic, begin in mark.begins.items():
        if topic not in identity.topics:
            continue
        if broker.identity_of(begin.incarnation) != identity.topics[topic]:
            raise CheckpointDamaged(
                f"topic {topic!r} was deleted and created again since {identity.pipe} was reset to a time. Try: penstock group "
                f"reset {identity.pipe} with --to or --to-earliest"
            )
        begins[topic] = dict(begin.offsets)
    if mark.former:
        begins = _pass_over_nothing(
            begins, identity, peek_checkpoint(session, root, mark.former), broker, ledger=ledger
        )
    log.info("begins_at_a_time", pipe=identity.pipe, begins=begins, by=mark.by, former=mark.former)
    return begins


def _pass_over_nothing(
    begins: dict[str, dict[int, int]], identity: Identity, former: Checkpoint, broker: SparkBroker, *, ledger: bool
) -> dict[str, dict[int, int]]:
    """A topic that was no source, and a partition that was not read, begin at their oldest record."""
    again = f"penstock group reset {identity.pipe} with --to or --to-earliest"
    try:
        before = former.read_identity()
        done = {} if before is None else _settled(before, former, broker, ledger=ledger)
    except (CheckpointDamaged, *JAVA_ERRORS) as error:
        raise CheckpointDamaged(
            f"{former.path}, the former checkpoint of {identity.pipe}, cannot be read. Try: {again}"
        ) from error
    if before is None:
        raise CheckpointDamaged(
            f"{former.path}, the former checkpoint of {identity.pipe}, is gone, and its position counts. Try: moving it back; or "
            f"{again}"
        )
    if before.state or before.plan is not None:
        raise CheckpointDamaged(
            f"the former transform of {identity.pipe} kept state over several events, which would be lost. Try: "
            f"penstock group reset {identity.pipe} --to-earliest"
        )
    found = {}
    for topic in begins.keys() & before.topics.keys():
        is_same = before.topics[topic] == identity.topics[topic]
        found[topic] = _no_further(topic, begins[topic], done) if is_same else begins[topic]
    return found


def _no_further(topic: str, begins: Mapping[int, int], done: Offsets) -> dict[int, int]:
    return {p: min(offset, done[topic, p]) for p, offset in begins.items() if (topic, p) in done}


def _settled(before: Identity, former: Checkpoint, broker: SparkBroker, *, ledger: bool) -> Offsets:
    """The position up to which all is done: committed; in a streaming plan reported and rejected, too, which follow that."""
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
