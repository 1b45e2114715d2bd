"""Where a transform begins that was reset to a time.

The reset left the offsets of that time in the transform's mark. It must not pass over an event that the transform has not read.
So where the former checkpoint is at hand, a partition begins at its position there, if that comes first.
"""

from collections.abc import Mapping

import structlog
from pyspark.sql import SparkSession

from services.core.transform_marks import TransformMark
from spark.brokers.contract import SparkBroker
from spark.jobs.checkpoint import Checkpoint, CheckpointDamaged, Identity, peek_checkpoint
from spark.jobs.open_batches import REJECTED_FILE, REPORTED_FILE, UpTo
from spark.records import Begins, Offsets

log = structlog.get_logger()


def find_begins(
    session: SparkSession, root: str, broker: SparkBroker, identity: Identity, mark: TransformMark | None
) -> Begins:
    """For the first batch of a new checkpoint, by topic; empty without a reset to a time. root: the folder of all checkpoints.

    identity: of the new checkpoint. Raises CheckpointDamaged when the offsets are of another topic, or when the transform keeps
    state, which would lack what came before.
    """
    if mark is None or not mark.begins:
        return {}
    if identity.state:
        raise CheckpointDamaged(
            f"the transform of {identity.pipe} keeps state over several events, so it cannot begin at a time: its first results "
            f"would lack what came before. Try: penstock group reset {identity.pipe} --to-earliest"
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
    former = None if not mark.former else peek_checkpoint(session, root, mark.former)
    if former is not None and (before := former.read_identity()) is not None:
        done = _settled(former, broker)
        for topic in begins.keys() & before.topics.keys():
            if before.topics[topic] == identity.topics[topic]:
                begins[topic] = _no_further(begins[topic], {p: n for (one, p), n in done.items() if one == topic})
    log.info("begins_at_a_time", pipe=identity.pipe, begins=begins, by=mark.by, knows_former=former is not None)
    return begins


def _no_further(begins: Mapping[int, int], done: Mapping[int, int]) -> dict[int, int]:
    """Without a partition that was not read: that begins at its oldest record."""
    return {partition: min(offset, done[partition]) for partition, offset in begins.items() if partition in done}


def _settled(former: Checkpoint, broker: SparkBroker) -> Offsets:
    """The position up to which all is done: committed, and where that is noted, reported and rejected, too."""
    done = former.committed_offsets(broker.parse_offsets)
    for name in (REPORTED_FILE, REJECTED_FILE):
        note = former.read_note(name, UpTo)
        if note is not None:
            noted = note.offsets()
            done = {place: min(offset, noted[place]) for place, offset in done.items() if place in noted}
    return done
