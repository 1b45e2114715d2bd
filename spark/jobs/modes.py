"""The mode of each pipe: Spark's real-time mode, or micro-batches. Decided when the service starts, and kept in the checkpoint.

`mode: auto` takes real-time mode where nothing is lost by it. With one source, both modes keep the same offsets in a checkpoint.
So such a pipe may change its mode at each start, and goes on in micro-batches when Spark refuses to run it in real-time mode.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import structlog
from pyspark.sql import SparkSession

from services.core.yaml_source import BadConfiguration
from spark.brokers.contract import SparkBroker
from spark.health import SLOW
from spark.java import JAVA_ERRORS
from spark.jobs.attempts import forget_parts
from spark.jobs.checkpoint import CheckpointDamaged, peek_checkpoint
from spark.jobs.open_batches import REJECTED_FILE, REPORTED_FILE, write_up_to
from spark.jobs.query import Query
from spark.jobs.replay import BadRecords, ReportedBatches
from spark.session import slots
from spark.settings import SelectedPipes, TransformSettings
from spark.transforms.preparation import Prepared, prepare_pipe

log = structlog.get_logger()

REAL_TIME_BATCH_S = 15
"""A real-time query processes each event at once and commits its progress so often; after a crash it repeats at most that.

Events wait while Spark commits and plans the next batch, 0.2 to 0.6 s: with 5 s these were more than 5 % of them."""
MODE_FILE = "mode.json"
"""The mode of the last run, or MICRO_BATCH_IN_PLAN. Earlier versions do not write it: the checkpoint's `kind` says it there."""
Mode = Literal["micro-batch", "real-time"]
MICRO_BATCH_IN_PLAN = "in plan"
"""In the note: micro-batches that are part of the streaming plan."""

REFUSED = "STREAMING_REAL_TIME_MODE"
"""Spark's class of errors for what it cannot run in real-time mode."""


class MorePartitions(Exception):
    """A real-time pipe has more partitions than task slots: the last ones would never be read."""


class Reason(NamedTuple):
    """Why a pipe runs in micro-batches. code: one word, for metrics. text: for a person."""

    code: str
    text: str


def choose_modes(
    session: SparkSession,
    settings: TransformSettings,
    broker: SparkBroker,
    selected: SelectedPipes,
    prepared: Sequence[Prepared],
) -> list[Prepared]:
    """These pipes, those with `mode: auto` in real-time mode where it may be. Blocking. Raises UnknownTopic, Unavailable."""
    prepared = [prefer_plan(broker, each, kind=_kind_of_several(session, settings, each)) for each in prepared]
    found = slots(settings.master)
    free = 0 if found is None else found - 1
    free -= sum(broker.count_partitions(session, list(each.views)) for each in prepared if each.real_time)
    chosen = []
    for each in prepared:
        if each.transform.mode != "auto":
            chosen.append(each)
            continue
        live, reason = each, _why_not(session, settings, broker, each)
        if reason is None:
            live, reason = _prepare_real_time(session, broker, selected, each)
        if reason is None:
            needed = broker.count_partitions(session, list(each.views))
            if needed > free:
                reason = Reason(
                    "slots",
                    f"it needs {needed} more task slots. Try: PENSTOCK_TRANSFORM_MASTER=auto (--master), or a larger local[N]",
                )
            else:
                free -= needed
        if reason is None:
            fallback = replace(each, in_plan=True) if len(each.views) > 1 else each
            chosen.append(replace(live, fallback=fallback, partitions=needed))
            log.info("pipe_mode", pipe=each.pipe, mode="real-time")
        else:
            chosen.append(replace(each, why_not=reason.code))
            log.info("pipe_mode", pipe=each.pipe, mode="micro-batch", because=reason.text)
    if found is None:
        return chosen
    return [_with_room(session, broker, each, free) for each in chosen]


def _with_room(session: SparkSession, broker: SparkBroker, prepared: Prepared, free: int) -> Prepared:
    """A pipe whose file asks for real-time mode knows how many partitions may have a task slot. free: slots that nobody has."""
    if not prepared.real_time or prepared.fallback is not None:
        return prepared
    return replace(prepared, partitions=broker.count_partitions(session, list(prepared.views)) + max(0, free))


def prefer_plan(broker: SparkBroker, prepared: Prepared, *, kind: str | None = None) -> Prepared:
    """This pipe, its micro-batches as part of one streaming plan where that is possible: it costs a third less than a plan for
    each batch, which Python makes.

    Where Spark's own connector reads and writes, that is, where it could run in real-time mode. The checkpoint is the same. kind:
    of the checkpoint, if there is one: several sources are one plan only where real-time mode has made it.
    """
    row_by_row = prepared.per_batch and prepared.transform.sql is not None and not prepared.obstacle
    same = len(prepared.views) == 1 or kind == IN_PLAN
    keeps = prepared.out.carries_events and not prepared.deduplicates and not prepared.tables
    return replace(prepared, in_plan=broker.real_time and row_by_row and same and keeps)


def _why_not(
    session: SparkSession, settings: TransformSettings, broker: SparkBroker, prepared: Prepared
) -> Reason | None:
    """The first reason against real-time mode; None: there is none but slots."""
    transform = prepared.transform
    if not broker.real_time:
        return Reason(
            "broker", "only Kafka can be read in real-time mode. Try: a broker kafka://HOST:9092, if seconds matter"
        )
    if transform.python is not None:
        return Reason("python", "Spark runs no Python functions in real-time mode. Try: write the transform in SQL")
    if transform.deduplicate_within is not None:
        return Reason(
            "deduplication",
            "deduplicate_within needs micro-batches. Try: leave it out, if receivers recognise repeated events by their id",
        )
    if not prepared.row_by_row:
        return Reason(
            "state",
            "the transform works on several events. Try: a pipe of its own for the part that treats each event by itself",
        )
    if "interval" in transform.model_fields_set:
        return Reason("interval", "interval is set, and only micro-batches have one. Try: leave it out")
    if settings.batch_timeout * SLOW < REAL_TIME_BATCH_S * 2:
        return Reason(
            "batch_timeout",
            "a batch in real-time mode lasts 15 s, and batch_timeout is too short for that. Try: a longer batch_timeout",
        )
    if not prepared.out.carries_events:
        return Reason(
            "new_events",
            "the transform makes new events, which get their origins by the micro-batch. Try: return `event`, if each "
            "result stands for one event",
        )
    if prepared.obstacle:
        return Reason("plan", f"the transform {prepared.obstacle}. Try: a pipe of its own for what works without that")
    if slots(settings.master) is None:
        return Reason(
            "cluster", "the number of task slots of a cluster changes. Try: mode: real-time, with enough executors"
        )
    return _why_checkpoint_does_not(session, settings, prepared)


def _prepare_real_time(
    session: SparkSession, broker: SparkBroker, selected: SelectedPipes, prepared: Prepared
) -> tuple[Prepared, Reason | None]:
    """The pipe in real-time mode, where `event` has one more field: its results must not show it."""
    reason = Reason(
        "event",
        "it returns all fields of `event`, and `event` has one more field in real-time mode. Try: name the fields",
    )
    try:
        live = prepare_pipe(session, selected, prepared.pipe, max_bytes=broker.max_record_bytes, real_time=True)
    except BadConfiguration:
        return prepared, reason
    same = live.out.payload == prepared.out.payload and not prepared.shows_event
    return live, None if same else reason


def _why_checkpoint_does_not(session: SparkSession, settings: TransformSettings, prepared: Prepared) -> Reason | None:
    checkpoint = peek_checkpoint(session, settings.checkpoint_root(), prepared.pipe)
    try:
        identity = checkpoint.read_identity()
        if identity is None:
            return None
        if identity.kind == PER_BATCH and (len(prepared.views) > 1 or list(identity.topics) != list(prepared.views)):
            return Reason(
                "checkpoint",
                "its checkpoint was made in micro-batches with several sources. Try: a new checkpoint, which writes all events "
                f"again (penstock group reset {prepared.pipe} --to-earliest)",
            )
        if identity.ran and checkpoint.newest("commits") is None:
            return Reason(
                "checkpoint",
                "its first batch is planned and not done. Try: another start of the service, after that batch",
            )
    except (CheckpointDamaged, *JAVA_ERRORS):
        return Reason("checkpoint", "its checkpoint cannot be read. Try: what the error of its query says")
    return None


def _kind_of_several(session: SparkSession, settings: TransformSettings, prepared: Prepared) -> str | None:
    """The kind of its checkpoint, where that matters."""
    if len(prepared.views) == 1 or not prepared.per_batch:
        return None
    try:
        identity = peek_checkpoint(session, settings.checkpoint_root(), prepared.pipe).read_identity()
    except (CheckpointDamaged, *JAVA_ERRORS):
        return None  # its job reports it
    return None if identity is None else identity.kind


PER_BATCH = "per batch"
IN_PLAN = "in plan"


def checkpoint_kind(prepared: Prepared) -> str:
    """How a new checkpoint keeps offsets: one source for all streams, or one for each.

    Earlier versions expect the kind of the mode that the pipe file asks for. With one source the kinds are the same.
    """
    as_per_batch = prepared.in_plan or (prepared.real_time and prepared.transform.mode == "auto")
    return PER_BATCH if prepared.per_batch or (as_per_batch and len(prepared.views) == 1) else IN_PLAN


def names_sources(prepared: Prepared) -> bool:
    """Whether a new checkpoint keeps the offsets of each source by its name. Not where the transform may change its mode: in
    micro-batches there is one source for all streams."""
    return not prepared.per_batch and (not prepared.row_by_row or len(prepared.views) > 1)


def enter_mode(query: Query, kind: str) -> None:
    """Before a run: settle what the last run in another mode left open. kind: of the checkpoint.

    Where each batch is computed by itself, its dead letters and its report are durable before its commit. In a streaming plan
    they follow it. Blocking. Raises the errors of reading and writing.
    """
    if not query.prepared.row_by_row:
        return
    checkpoint, mode = query.checkpoint, MICRO_BATCH_IN_PLAN if query.prepared.in_plan else mode_of(query.prepared)
    newest = checkpoint.newest("commits")
    before = checkpoint.read_note(MODE_FILE, str) or ("micro-batch" if kind == PER_BATCH else "real-time")
    if before != mode:
        forget_parts(checkpoint)
    if before == mode or newest is None:
        pass
    elif mode == "micro-batch":
        BadRecords(query)
        if query.ledger:
            ReportedBatches(query)
    elif before == "micro-batch":
        end = checkpoint.offsets(newest, query.broker.parse_offsets)
        write_up_to(query, REJECTED_FILE, newest, end)
        if query.ledger:
            write_up_to(query, REPORTED_FILE, newest, end)
    if checkpoint.read_note(MODE_FILE, str) != mode:
        checkpoint.write_note(MODE_FILE, mode)


def mode_of(prepared: Prepared) -> Mode:
    return "real-time" if prepared.real_time else "micro-batch"
