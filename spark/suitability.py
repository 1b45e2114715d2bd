"""Whether this broker and this master can run a pipe the way it asks for; decided before its query starts."""

from collections.abc import Sequence

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from services.core.yaml_source import BadConfiguration, Problem
from spark.brokers.endpoint import Endpoint
from spark.errors import shorten
from spark.pipe_file import Chosen
from spark.session import own_session, slots
from spark.settings import TransformSettings
from spark.transforms.preparation import Prepared


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
        elif not each.row_by_row and (trouble := _streaming_trouble(session, endpoint, each)):
            kind = "sql" if each.transform.sql is not None else "python"
            problems.append(chosen.document.problem((*key, kind), f"cannot run on a stream: {trouble}"))
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


def _streaming_trouble(session: SparkSession, endpoint: Endpoint, prepared: Prepared) -> str | None:
    """Why Spark would refuse the transform as part of a streaming plan; None when it takes it."""
    own = own_session(session)
    try:
        frames = {
            stream: view.good(view.judge(endpoint.read_stream(own, [stream], 1)))
            for stream, view in prepared.views.items()
        }
        plan = prepared.apply(frames, own)._jdf.queryExecution().analyzed()
        jvm = own.sparkContext._jvm
        assert jvm is not None
        checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
        checker.checkForStreaming(plan, jvm.org.apache.spark.sql.streaming.OutputMode.Append())
    except PySparkException as error:
        return shorten(error)
    return None
