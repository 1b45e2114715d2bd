"""Whether this broker and this master can run a pipe the way it asks for; decided before its query starts."""

from collections.abc import Sequence

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from services.core.yaml_source import BadConfiguration, Problem
from spark.adoption import changed_state
from spark.brokers.endpoint import Endpoint
from spark.checkpoint import CheckpointDamaged, peek_checkpoint
from spark.errors import shorten
from spark.pipe_file import Chosen
from spark.session import own_session, slots
from spark.settings import TransformSettings
from spark.shapes import EVENT_TIME
from spark.transforms.plan_check import watermarks
from spark.transforms.preparation import Prepared

_TRY_WATERMARK = "Try: `watermark: 10m` in the pipe file, and grouping or joining by event_time"


def check_suitability(
    session: SparkSession, settings: TransformSettings, endpoint: Endpoint, chosen: Chosen, prepared: Sequence[Prepared]
) -> None:
    """Blocking. Raises BadConfiguration with every mistake; UnknownTopic, Unavailable."""
    problems = []
    needed = 0
    for each in prepared:
        key = ("pipes", each.pipe, "transform")
        if each.transform.mode == "real-time" and not endpoint.real_time:
            problems.append(
                chosen.document.problem((*key, "mode"), "real-time mode needs Kafka. Try: mode: micro-batch")
            )
        elif each.transform.mode == "real-time":
            needed += endpoint.partition_count(session, list(each.views))
        elif changed := _changed_state(session, settings, each):
            problems.append(chosen.document.problem((*key, _kind(each)), changed))
        elif not each.row_by_row and (trouble := _streaming_trouble(session, endpoint, each)):
            problems.append(chosen.document.problem((*key, _kind(each)), f"cannot run on a stream: {trouble}"))
    found = slots(settings.master)
    if needed and found is not None and found < needed + 1:
        problems.append(
            Problem(
                "master",
                "",
                f"{settings.master} runs {found} tasks at once; real-time pipes hold one for each of their {needed} "
                f"partitions, and one more is needed. Try: local[{needed + 1}]",
            )
        )
    if problems:
        raise BadConfiguration(problems)


def _kind(prepared: Prepared) -> str:
    return "sql" if prepared.transform.sql is not None else "python"


def _changed_state(session: SparkSession, settings: TransformSettings, prepared: Prepared) -> str | None:
    try:
        return changed_state(peek_checkpoint(session, settings.checkpoint_root(), prepared.pipe), prepared)
    except (CheckpointDamaged, Py4JError, PySparkException):
        return None  # that is the pipe's own trouble: its job says so, and the others go on


def _streaming_trouble(session: SparkSession, endpoint: Endpoint, prepared: Prepared) -> str | None:
    """Why the transform cannot be part of a streaming plan; None when it can."""
    if prepared.deduplicates:
        return "deduplicate_within needs a transform that treats each event by itself. Try: a pipe of its own before this one"
    own = own_session(session)
    try:
        frames = {
            stream: prepared.watermarked(view.good(view.judge(endpoint.read_stream(own, [stream], 1))))
            for stream, view in prepared.views.items()
        }
        result = prepared.apply(frames, own)
        if others := watermarks(result) - {EVENT_TIME}:
            return f"it sets a watermark over {', '.join(sorted(others))}. {_TRY_WATERMARK}"
        plan = result._jdf.queryExecution().analyzed()
        jvm = own.sparkContext._jvm
        assert jvm is not None
        checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
        checker.checkForStreaming(plan, jvm.org.apache.spark.sql.streaming.OutputMode.Append())
    except PySparkException as error:
        hint = "" if prepared.transform.watermark else f" {_TRY_WATERMARK}"
        return f"{shorten(error)}{hint}"
    return None
