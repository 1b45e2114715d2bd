"""The checks before a query starts: that broker and master can run the pipe, and that its checkpoint is that of its last run."""

import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence

import msgspec
import structlog
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from services.core.control.transform_marks import TransformMark
from services.core.pipe_file.state_plan import StatePlan, compare_plans
from services.core.pipe_file.topic_names import dead_letter_topic, output_topic
from services.core.yaml_source import BadConfiguration, Problem
from spark.brokers.contract import SparkBroker
from spark.cluster.master import MasterKind
from spark.errors import shorten
from spark.java import JAVA_ERRORS, check_streamable
from spark.jobs.attempts import PART_OF, batch_of
from spark.jobs.checkpoint import NAMED_VERSION, Checkpoint, CheckpointDamaged, Identity, peek_checkpoint
from spark.jobs.dead_letters import DEAD, LATE, bad_records_name
from spark.jobs.modes import IN_PLAN, PER_BATCH, checkpoint_kind, names_sources
from spark.jobs.query import Query
from spark.jobs.replay import REJECTS
from spark.jobs.restart import Beginning
from spark.jobs.streaming_plan import source_name
from spark.marks import Marks
from spark.records import EVENT_TIME
from spark.session import own_session, slots
from spark.settings import SelectedPipes, TransformSettings
from spark.transforms.analysis import watermarks
from spark.transforms.preparation import Prepared
from spark.transforms.user_state import would_take_late_events

log = structlog.get_logger()

_TRY_SIDE = "Try: the stream on the left of a LEFT JOIN: a row of a table without any event has no identity"
_TRY_WATERMARK = "Try: `watermark: 10m` in the pipe file, and grouping or joining by event_time"


def check_suitability(
    session: SparkSession,
    settings: TransformSettings,
    broker: SparkBroker,
    selected: SelectedPipes,
    prepared: Sequence[Prepared],
) -> None:
    """Blocking. Raises BadConfiguration with every mistake; UnknownTopic, Unavailable."""
    problems = []
    needed = 0
    for each in prepared:
        key = ("pipes", each.pipe, "transform")
        text_key = (*key, "python" if each.transform.sql is None else "sql")
        if each.real_time and not broker.real_time:
            remedy = "real-time mode needs Kafka. Try: mode: micro-batch, or mode: auto, which uses real-time mode where possible"
            problems.append(selected.document.problem((*key, "mode"), remedy))
        elif each.real_time:
            needed += broker.count_partitions(session, list(each.views))
        elif changed := _changed_state(session, settings, each):
            problems.append(selected.document.problem(text_key, changed))
        elif not each.row_by_row and (reason := _why_not_streamable(session, broker, each)):
            problems.append(selected.document.problem(text_key, f"cannot run on a stream: {reason}"))
        elif reason := why_no_state(settings, each):
            problems.append(selected.document.problem(text_key, reason))
    problems += missing_slots(settings, needed)
    if problems:
        raise BadConfiguration(problems)


def missing_slots(settings: TransformSettings, needed: int) -> list[Problem]:
    """A problem when the master runs too few tasks at once. needed: the partitions that are read in real-time mode."""
    local = settings.master_kind() is MasterKind.LOCAL
    found = slots(settings.master) if local else settings.executor_settings().slots
    if not needed or found is None or found > needed:
        return []
    runs = settings.master if local else f"{settings.executors} executors with executor_cores {settings.executor_cores}"
    remedy = f"local[{needed + 1}]" if local else "more of them"
    text = (
        f"{runs} runs {found} tasks at once; real-time pipes need one for each of their {needed} "
        f"partitions, and one more. Try: {remedy}"
    )
    return [Problem("master" if local else "executors", "", text)]


def why_no_state(settings: TransformSettings, prepared: Prepared) -> str | None:
    """The reason why its state over batches cannot be kept; None when it can, or when it has none."""
    keeps_state = not prepared.row_by_row or prepared.deduplicates
    if settings.checkpoints or not keeps_state or settings.master_kind() is MasterKind.LOCAL:
        return None
    return (
        "the executors write its state over batches, but the checkpoints are in a folder of this host. "
        "Try: --checkpoints with an object store or a folder that all executors see, too"
    )


def _changed_state(session: SparkSession, settings: TransformSettings, prepared: Prepared) -> str | None:
    try:
        return changed_state(peek_checkpoint(session, settings.checkpoint_root(), prepared.pipe), prepared)
    except (CheckpointDamaged, *JAVA_ERRORS):
        return None  # a fault of this pipe alone: its job reports it, and the others run


def _why_not_streamable(session: SparkSession, broker: SparkBroker, prepared: Prepared) -> str | None:
    """The reason why the transform cannot be part of a streaming plan; None when it can."""
    if prepared.deduplicates:
        return "deduplicate_within needs a transform that treats each event by itself. Try: a pipe of its own before this one"
    own = own_session(session)
    try:
        frames = {
            stream: prepared.watermarked(view.good(view.check(broker.read_stream(own, [stream], 1, checkpoint=""))))
            for stream, view in prepared.views.items()
        }
        result = prepared.analyse(frames, own)
        if others := watermarks(result) - {EVENT_TIME}:
            return f"it sets a watermark over {', '.join(sorted(others))}. {_TRY_WATERMARK}"
        if would_take_late_events(result):
            return f"transformWithState by event time gets no {EVENT_TIME}. Try: selecting {EVENT_TIME} before groupBy"
        check_streamable(result)
    except PySparkException as error:
        hint = "" if prepared.transform.watermark else f" {_TRY_WATERMARK}"
        reason = shorten(error)
        if prepared.tables and "static DataFrame" in reason:
            reason, hint = reason.split("; ~")[0], f". {_TRY_SIDE}"
        return f"{reason}{hint}"
    return None


def adopt_checkpoint(
    checkpoint: Checkpoint,
    prepared: Prepared,
    topics: Mapping[str, str],
    marks: Marks,
    *,
    version: int = 1,
    begins_of: Callable[[Identity, TransformMark | None], Beginning] = lambda _identity, _mark: Beginning(),
) -> Identity:
    """Use the checkpoint for this pipe: a new one or that of its last run. topics: identity of each source topic.

    version: of the format that this run writes; a newer one stays. begins_of: where a new checkpoint begins (`find_begins`).

    A changed transform is fine if it keeps no state, or can use the state that is there; so is an added source. A topic that was
    created again is not: its offsets mean other records. Nor is a new checkpoint for a transform that has begun, by its mark.
    When it returns, the mark is durable. To be called under the checkpoint's lock. Raises CheckpointDamaged, BrokerError kinds.
    """
    found, mark, beginning = checkpoint.read_identity(), marks.read(prepared.pipe), Beginning()
    if found is None:
        identity = _new_identity(checkpoint, prepared, topics, mark)
        beginning = begins_of(identity, mark)
        needed = NAMED_VERSION if identity.named or beginning.begins else identity.version
        identity = msgspec.structs.replace(identity, version=max(version, needed), begins=beginning.begins)
    else:
        _check_fits(checkpoint, found, prepared, topics)
        _check_mark(checkpoint, found, mark)
        known = {**found.topics, **topics}
        identity = msgspec.structs.replace(
            found,
            topics=known,
            transform=_digest(prepared),
            state=prepared.state,
            removed=[topic for topic in known if topic not in prepared.views],
            plan=_plan(prepared, named=found.named),
            version=max(found.version, version),
        )
    if identity != found:  # before the mark: the mark of a checkpoint that was never stored would refuse the next start
        checkpoint.write_identity(identity)
        beginning.record(prepared.pipe)
    plan = identity.plan if identity.ran else None
    if mark is None or not mark.fits(identity.id) or (mark.checkpoint and mark.plan != plan):
        checkpoint.check_claim()
        marks.write(prepared.pipe, identity.id, plan)
    return identity


def _new_identity(
    checkpoint: Checkpoint, prepared: Prepared, topics: Mapping[str, str], mark: TransformMark | None
) -> Identity:
    if checkpoint.newest("offsets") is not None or checkpoint.has_metadata():
        raise checkpoint.damaged("penstock.json is missing")
    if mark is not None and mark.has_begun:
        raise _replaced(checkpoint, prepared.pipe, "it is gone", mark)
    return Identity(
        id=uuid.uuid4().hex,
        pipe=prepared.pipe,
        topics=dict(topics),
        transform=_digest(prepared),
        kind=checkpoint_kind(prepared),
        state=prepared.state,
        named=(named := names_sources(prepared)),
        plan=_plan(prepared, named=named),
    )


def _plan(prepared: Prepared, *, named: bool) -> StatePlan | None:
    return prepared.plan and msgspec.structs.replace(prepared.plan, ordered=not named)


def _check_fits(checkpoint: Checkpoint, found: Identity, prepared: Prepared, topics: Mapping[str, str]) -> None:
    if found.pipe != prepared.pipe:
        raise checkpoint.damaged(f"it belongs to the pipe {found.pipe!r}, not {prepared.pipe!r}")
    kind = IN_PLAN if found.named and not prepared.per_batch else checkpoint_kind(prepared)
    if found.kind != kind and not _may_change_mode(found, prepared):
        raise checkpoint.damaged(f"it was made by a transform that runs {found.kind}, this one runs {kind}")
    for topic, known in found.topics.items():
        if topics.get(topic, known) != known:
            raise checkpoint.damaged(f"topic {topic!r} was deleted and created again")
    _check_files(checkpoint, ran=found.ran)
    if not prepared.per_batch:
        _check_sources(checkpoint, found, prepared)
    if changed := changed_state(checkpoint, prepared):
        raise CheckpointDamaged(changed)


def _check_sources(checkpoint: Checkpoint, found: Identity, prepared: Prepared) -> None:
    """Of a transform in the plan. Spark would read a source that comes back from its start, and would give the offsets of sources
    without names to others when their order changes."""
    planned = checkpoint.newest("offsets")
    if planned is None:
        return
    names = checkpoint.source_names(planned)
    remedy = f"penstock group reset {prepared.pipe} --to-earliest (all results come again)"
    if found.named:
        back = [one for one in prepared.views if one in found.removed and source_name(one) not in names]
        if prepared.state and back:
            raise CheckpointDamaged(
                f"checkpoint {checkpoint.path}: {', '.join(back)} was a source before, and was removed: Spark would read it from "
                f"its start again, and its events would count twice. Try: the sources without it; or {remedy}"
            )
        left = [one for one in found.topics if source_name(one) in names and one not in prepared.views]
        if left and not prepared.real_time and not checkpoint.has_batch("commits", planned):
            raise CheckpointDamaged(
                f"checkpoint {checkpoint.path}: batch {planned} is planned and not done, and has events of {', '.join(left)}, "
                f"which is no source any more. Try: a start with the former sources, and the change after it; or {remedy}"
            )
        return
    known = [topic for topic in found.topics if topic in prepared.views]
    if known != list(prepared.views) or len(names) != len(known):
        raise CheckpointDamaged(
            f"checkpoint {checkpoint.path}: it knows its sources by their order, and they changed: it "
            f"has {len(names)} of {', '.join(found.topics)}, the pipe file has {', '.join(prepared.views)}. Try: the former "
            f"sources in their order; or {remedy}"
        )


def _check_mark(checkpoint: Checkpoint, found: Identity, mark: TransformMark | None) -> None:
    """Whether the transform began with this checkpoint, or may do so. Version 0.1 made new checkpoints without a mark."""
    if mark is None or not mark.has_begun or mark.fits(found.id):
        return
    if found.penstock:
        raise _replaced(checkpoint, found.pipe, f"it is {found.id}", mark)
    hint = "Penstock 0.1 made it, which writes no marks. The transform continues with it"
    log.warning("checkpoint_of_earlier_version", pipe=found.pipe, checkpoint=found.id, known=mark.text, hint=hint)


def _replaced(checkpoint: Checkpoint, pipe: str, problem: str, mark: TransformMark) -> CheckpointDamaged:
    """Short: a person reads `shorten` of it."""
    return CheckpointDamaged(
        f"checkpoint {checkpoint.path}: {problem}, but {mark.text}. Try: restoring that one, or penstock group reset {pipe} "
        "--to-earliest (all results come again)"
    )


def record_ran(checkpoint: Checkpoint, identity: Identity, marks: Marks) -> bool:
    """Record that the pipe has planned a batch; returns whether it has. From then on a checkpoint without batches is damaged, and
    the mark says what the checkpoint keeps. Raises BrokerError kinds.

    A query that fails before it plans its first batch has damaged nothing.
    """
    if identity.ran:
        return True
    if checkpoint.newest("offsets") is None:
        return False
    checkpoint.write_identity(msgspec.structs.replace(identity, ran=True))
    if identity.plan is not None:  # adopt_checkpoint does it when a crash comes first
        marks.write(identity.pipe, identity.id, identity.plan)
    return True


def changed_state(checkpoint: Checkpoint, prepared: Prepared) -> str | None:
    """The reason why this transform cannot use the state in the checkpoint, which another one left; None when it can.

    Raises CheckpointDamaged.
    """
    found = checkpoint.read_identity()
    if found is None or checkpoint.newest("offsets") is None:
        if found is not None and found.begins and prepared.state:
            return (
                f"it was reset to a time, so it cannot keep state. Try: penstock group reset {found.pipe} --to-earliest"
            )
        return None
    same_text = found.state == prepared.state or (not found.state and found.transform == _digest(prepared))
    if prepared.state and same_text:
        return None
    if found.plan is not None:
        return refuse_plan(prepared, found.plan)
    if not prepared.state:
        return None
    by_itself = not found.state and found.kind == "per batch"
    return _refuse(
        prepared, "the former one treated each event by itself" if by_itself else "what changed is not known"
    )


def refuse_plan(prepared: Prepared, former: StatePlan) -> str | None:
    """The reason why this transform cannot use the state of the former one; None when it can."""
    if prepared.plan is None:
        return _refuse(
            prepared, "this one treats each event by itself" if prepared.row_by_row else "what changed is not known"
        )
    differences = compare_plans(former, prepared.plan)
    return _refuse(prepared, differences) if differences else None


def _refuse(prepared: Prepared, differences: str) -> str:
    return (
        f"the checkpoint has the state of another transform over several events: {differences}. The results would be made of "
        "both. Try: the former one again; or this one in a pipe of another name, which reads the sources from their start, with "
        f"`removed: {{{prepared.pipe}: {{drop: WHY}}}}` in the pipe file for this name; or penstock group reset {prepared.pipe} "
        "--to-earliest, which reads the sources from their start under this name. In the last two cases all results come again, "
        "also those that were delivered. Receivers drop results whose ids they know: give new results other ids"
    )


def _may_change_mode(found: Identity, prepared: Prepared) -> bool:
    """With the same one source, a transform that keeps no state may change between micro-batches and real-time mode.

    Version 0.1 does not say whether there is state.
    """
    known = found.kind == PER_BATCH or bool(found.penstock) or found.transform == _digest(prepared)
    same_one = len(prepared.views) == 1 and list(found.topics) == list(prepared.views)
    return prepared.row_by_row and known and not found.state and not found.named and same_one


def _digest(prepared: Prepared) -> str:
    text = prepared.transform.sql or prepared.transform.python or ""
    return hashlib.sha256(text.encode()).hexdigest()


def check_not_older(query: Query) -> None:
    """Raise CheckpointDamaged when a topic holds a batch that the pipe's checkpoints do not know.

    The next batches would get the numbers of stored ones. The broker would take them for stored, and they would be lost.
    """
    rejects, out, dead = query.beside(REJECTS), output_topic(query.pipe), dead_letter_topic(query.pipe)
    _compare(query, out, query.writer)
    _compare(query, dead, f"{query.writer}:{DEAD}")
    _compare(query, out, f"{query.writer}:{PART_OF}", batch_of)
    _compare(query, dead, f"{query.writer}:{DEAD}:{PART_OF}", batch_of)  # of earlier versions
    _compare(query, dead, f"{query.writer}:{bad_records_name(query.prepared)}")
    _compare(query, dead, f"{query.writer}:{bad_records_name(query.prepared, PART_OF)}", batch_of)
    _compare(query, dead, f"{query.writer}:{LATE}")
    _compare(rejects, dead, f"{rejects.writer}:{DEAD}")
    _check_files(rejects.checkpoint, ran=False)


def _compare(query: Query, topic: str, writer: str, batch_of: Callable[[int], int] = int) -> None:
    epoch, planned = query.broker.last_epoch(topic, writer), query.checkpoint.newest("offsets")
    stored = None if epoch is None else batch_of(epoch)
    if stored is not None and (planned is None or planned < stored):
        raise query.checkpoint.damaged(
            f"it ends at batch {planned}, topic {topic!r} at batch {stored}: it is an older copy"
        )


def _check_files(checkpoint: Checkpoint, *, ran: bool) -> None:
    offsets, commits = checkpoint.newest("offsets"), checkpoint.newest("commits")
    if offsets is None and (ran or commits is not None):
        raise checkpoint.damaged("its offsets are gone")
    if offsets is not None and not checkpoint.has_metadata():
        raise checkpoint.damaged("the file metadata is gone")
    if offsets and not checkpoint.has_batch("offsets", offsets - 1):  # Spark keeps many, and begins with the last two
        raise checkpoint.damaged(f"offsets/{offsets - 1} is gone")
    if commits is not None and (offsets is None or commits > offsets):
        raise checkpoint.damaged(f"batch {commits} is done, but not in offsets")
    checkpoint.check_readable()
