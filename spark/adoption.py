"""Whether a checkpoint is the one that this pipe's last run left: decided before its query starts."""

import hashlib
import uuid
from collections.abc import Callable, Mapping

import msgspec

from services.core.pipes import dead_letter_topic, output_topic
from spark.checkpoint import REMEDY, Checkpoint, CheckpointDamaged, Identity
from spark.jobs.late import LATE
from spark.jobs.parts import PART_OF, batch_of
from spark.jobs.query import Query
from spark.jobs.rejects import DEAD, REJECTS
from spark.transforms.preparation import Prepared


def adopt(checkpoint: Checkpoint, prepared: Prepared, topics: Mapping[str, str]) -> Identity:
    """Take the checkpoint for this pipe, a new one or the one of its last run. topics: identity of each source topic.

    A changed transform is fine as long as it keeps no state; so is an added source. A topic that was made again is not: its
    offsets mean other records. Raises CheckpointDamaged.
    """
    digest = _digest(prepared)
    kind = "per batch" if prepared.per_batch else "in plan"
    found = checkpoint.read_identity()
    if found is None:
        if checkpoint.newest("offsets") is not None or checkpoint.has_metadata():
            raise _damaged(checkpoint, "penstock.json is missing")
        found = Identity(
            id=uuid.uuid4().hex,
            pipe=prepared.pipe,
            topics=dict(topics),
            transform=digest,
            kind=kind,
            state=prepared.state,
        )
        checkpoint.write_identity(found)
        return found
    _check_owner(checkpoint, found, prepared.pipe, kind, topics)
    _check_files(checkpoint, ran=found.ran)
    if changed := changed_state(checkpoint, prepared):
        raise CheckpointDamaged(changed)
    identity = msgspec.structs.replace(found, topics={**found.topics, **topics}, transform=digest, state=prepared.state)
    if identity != found:
        checkpoint.write_identity(identity)
    return identity


def note_ran(checkpoint: Checkpoint, identity: Identity) -> bool:
    """Remember that the pipe has noted a batch, so that a checkpoint without any is damaged from now on. Whether it has.

    The query of its bad records may be done with a batch before that of the good ones has noted its first; when that one
    fails just then, nothing is damaged.
    """
    if identity.ran:
        return True
    if checkpoint.newest("offsets") is None:
        return False
    checkpoint.write_identity(msgspec.structs.replace(identity, ran=True))
    return True


def changed_state(checkpoint: Checkpoint, prepared: Prepared) -> str | None:
    """Why this transform cannot go on with the state that another one left in the checkpoint; None when it can.

    Raises CheckpointDamaged.
    """
    found = checkpoint.read_identity()
    if found is None or not prepared.state or checkpoint.newest("offsets") is None:
        return None
    if found.state == prepared.state or (not found.state and found.transform == _digest(prepared)):
        return None
    return (
        f"it is not the transform that left its state over several events in checkpoint {checkpoint.place}: its results would "
        "be made of both. Try: the former one again; or this one in a pipe of another name, which reads the sources from their "
        "start; or moving the checkpoint away, which does so under this name (results come again, those that went out, too)"
    )


def _digest(prepared: Prepared) -> str:
    text = prepared.transform.sql or prepared.transform.python or ""
    return hashlib.sha256(text.encode()).hexdigest()


def check_not_older(query: Query) -> None:
    """Raise CheckpointDamaged when a topic holds a batch of which the pipe's checkpoints know nothing.

    Their next batches would get the numbers of stored ones, be taken for them, and vanish.
    """
    rejects, dead = query.beside(REJECTS), dead_letter_topic(query.pipe)
    _compare(query, output_topic(query.pipe), query.writer)
    _compare(query, dead, f"{query.writer}:{DEAD}")
    _compare(query, output_topic(query.pipe), f"{query.writer}:{PART_OF}", batch_of)
    _compare(query, dead, f"{query.writer}:{DEAD}:{PART_OF}", batch_of)
    _compare(query, dead, f"{query.writer}:{LATE}")
    _compare(rejects, dead, f"{rejects.writer}:{DEAD}")
    _check_files(rejects.checkpoint, ran=False)


def _compare(query: Query, topic: str, writer: str, batch_of: Callable[[int], int] = int) -> None:
    epoch, offsets = query.endpoint.last_epoch(topic, writer), query.checkpoint.newest("offsets")
    stored = None if epoch is None else batch_of(epoch)
    if stored is not None and (offsets is None or offsets < stored):
        what = f"it ends at batch {offsets}, topic {topic!r} at batch {stored}: it is an older copy"
        raise _damaged(query.checkpoint, what)


def _check_owner(checkpoint: Checkpoint, found: Identity, pipe: str, kind: str, topics: Mapping[str, str]) -> None:
    if found.pipe != pipe:
        raise _damaged(checkpoint, f"it belongs to the pipe {found.pipe!r}, not {pipe!r}")
    if found.kind != kind:
        raise _damaged(checkpoint, f"it was made by a transform that runs {found.kind}, this one runs {kind}")
    for topic, known in found.topics.items():
        if topics.get(topic, known) != known:
            raise _damaged(checkpoint, f"topic {topic!r} was deleted and made again")


def _check_files(checkpoint: Checkpoint, *, ran: bool) -> None:
    offsets, commits = checkpoint.newest("offsets"), checkpoint.newest("commits")
    if offsets is None and (ran or commits is not None):
        raise _damaged(checkpoint, "its offsets are gone")
    if offsets is not None and not checkpoint.has_metadata():
        raise _damaged(checkpoint, "the file metadata is gone")
    if commits is not None and (offsets is None or commits > offsets):
        raise _damaged(checkpoint, f"batch {commits} is done, but not in offsets")
    checkpoint.check_readable()


def _damaged(checkpoint: Checkpoint, what: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"checkpoint {checkpoint.place}: {what}. {REMEDY}")
