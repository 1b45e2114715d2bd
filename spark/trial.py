"""`python -m spark.trial`: runs the transform of one pipe on a sample of records and stores nothing. `penstock try` runs it.

The sample is one micro-batch of the code that runs live, on a broker that only keeps the records in memory. So outputs and dead
letters are the same as live. What differs: a transform over several events returns all of its results, also those that would wait
for the watermark. And no event is late, because lateness counts from one batch to the next.
"""

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pydantic import Field
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, DataType, StructType

from services.core.broker.record import Batch, Record
from services.core.event import ID
from services.core.jvm.jars import JarsUnavailable
from services.core.jvm.java import JavaNotFound
from services.core.pipe_file.topic_names import dead_letter_topic, output_topic
from services.core.process.lifecycle import configure_logs, report_bad_configuration
from services.core.process.settings import load_settings
from services.core.sample import PHASE, SampleRecord, TrialResult, UndeclaredField
from services.core.yaml_source import BadConfiguration
from spark.brokers.contract import BatchName, DataSourceBroker, open_spark_broker
from spark.cluster.master import AUTO, MasterKind
from spark.errors import shorten
from spark.health import Watchdog
from spark.java import java_process, why_ended
from spark.jobs.attempts import Attempts
from spark.jobs.checkpoint import open_checkpoint
from spark.jobs.culprits import TransformBroken
from spark.jobs.micro_batch import TransformHandler
from spark.jobs.query import Query
from spark.jobs.start_checks import check_suitability
from spark.records import NO_BEGINS, RAW, RAW_SCHEMA, VALUE, Begins, OffsetRange, to_arrow
from spark.session import open_session, own_session
from spark.settings import SelectedPipes, TransformSettings, load_pipes
from spark.tables import TableUnavailable
from spark.transforms.preparation import prepare_pipes
from spark.transforms.user_state import with_timers_at_end

ENDS_WITHIN_S = 3.0
"""After a failure: Java ends within this time, or it runs on."""


class TrialSettings(TransformSettings):
    """Runs the transform of one pipe (`only`) on a sample. `data` is a folder for scratch."""

    sample: Path = Field(Path("sample"), description="The sample: a list of `SampleRecord`, msgpack.")
    result: Path = Field(Path("result"), description="The file to write: a `TrialResult`, msgpack.")

    @classmethod
    def program(cls) -> str:
        return "python -m spark.trial"


class SampleBroker(DataSourceBroker):
    """Keeps in memory whatever is written to it, by topic. Its streams have no records."""

    real_time = True

    def __init__(self, max_record_bytes: int) -> None:
        super().__init__("sample:")
        self.max_record_bytes = max_record_bytes
        self.written: dict[str, list[Record]] = {}

    def identify(self, session: SparkSession, topics: Sequence[str]) -> dict[str, str]:
        return dict.fromkeys(topics, "sample")

    def stored_ranges(self, session: SparkSession, topics: Sequence[str]) -> list[OffsetRange]:
        return []

    def read_stream(
        self,
        session: SparkSession,
        topics: Sequence[str],
        max_events: int | None,
        *,
        checkpoint: str,
        name: str | None = None,
        begins: Begins = NO_BEGINS,
    ) -> DataFrame:
        """For the analysis of a transform: it never runs."""
        raw = StructType.fromDDL(RAW)
        assert isinstance(raw, StructType)
        columns = [f.lit(None).cast(field.dataType).alias(field.name) for field in raw.fields]
        return session.readStream.format("rate").load().select(*columns)

    def read_ranges(self, session: SparkSession, ranges: Sequence[OffsetRange]) -> DataFrame:
        return session.createDataFrame(RAW_SCHEMA.empty_table(), RAW)

    def write_records(self, session: SparkSession, records: Sequence[Record], topic: str, batch: BatchName) -> bool:
        self.written.setdefault(topic, []).extend(records)
        return True

    def append(self, session: SparkSession, topic: str, records: Sequence[Record]) -> None:
        self.written.setdefault(topic, []).extend(records)


def try_pipe(session: SparkSession, settings: TrialSettings, chosen: SelectedPipes, max_bytes: int) -> TrialResult:
    """Run the transform of the one chosen pipe on the sample. Blocking. Raises BadConfiguration, TableUnavailable.

    max_bytes: of an output record. The folder `settings.data` gets scratch.
    """
    broker = SampleBroker(max_bytes)
    prepared = prepare_pipes(session, chosen, max_bytes=max_bytes)
    check_suitability(session, settings, broker, chosen, prepared)
    (one,) = prepared
    for table in one.tables.values():
        table.load(session)
    sample = msgspec.msgpack.decode(settings.sample.read_bytes(), type=list[SampleRecord])
    kept, duplicates = _split_duplicates(sample) if one.deduplicates else (sample, [])
    session, broken = own_session(session), ""
    with open_checkpoint(session, settings.checkpoint_root(), one.pipe) as checkpoint:
        attempts = Attempts(one.version)
        attempts.open(checkpoint)
        query = Query(
            session,
            replace(
                one,
                transform=one.transform.model_copy(update={"deduplicate_within": None}),
                definition=one.definition._replace(apply=with_timers_at_end(one.definition.apply)),
            ),
            broker,
            checkpoint,
            writer=f"{one.pipe}:trial",
            report=lambda _report: None,
            ledger=False,
            stopping=threading.Event(),
            attempts=attempts,
            watchdog=Watchdog(settings.batch_timeout),
        )
        try:
            TransformHandler(query).process(_to_raw(session, kept), 0)
        except TransformBroken as error:
            broken = str(error)
    outputs = broker.written.get(output_topic(one.pipe), [])
    columns = {stream: view.columns for stream, view in one.views.items() if view.columns is not None}
    return TrialResult(
        outputs,
        broker.written.get(dead_letter_topic(one.pipe), []),
        [record.place for record in duplicates],
        broken,
        one.out.carries_events,
        one.row_by_row,
        one.out.gives_times,
        find_undeclared(sample, outputs, columns, one.out.payload) if one.out.carries_events and not broken else [],
    )


def find_undeclared(
    sample: Sequence[SampleRecord], outputs: Sequence[Record], columns: Mapping[str, StructType], payload: StructType
) -> list[UndeclaredField]:
    """The fields of payloads that no column declares, and that are in no output under that name. columns: by stream.

    payload: of the outputs. Where there are none, its columns count; none are named when it is the text `value`.
    """
    if not outputs and [name.lower() for name in payload.names] == [VALUE]:
        return []
    kept = {path.rpartition(".")[2].removesuffix("[]") for record in outputs for path in _paths(_parse(record), None)}
    kept |= set() if outputs else set(payload.names)
    found: Counter[tuple[str, str]] = Counter()
    for one in sample:
        if one.topic in columns:
            paths = dict.fromkeys(_paths(_parse(one.record), columns[one.topic]))  # once for each event
            found.update((one.topic, path) for path in paths)
    of = Counter(one.topic for one in sample)
    return [
        UndeclaredField(stream, path, events, of[stream])
        for (stream, path), events in found.items()
        if path.rpartition(".")[2] not in kept
    ]


def _parse(record: Record) -> Any:
    try:
        return msgspec.json.decode(record.value or b"")
    except (msgspec.DecodeError, RecursionError):
        return None


def _paths(value: Any, declared: DataType | None, path: str = "") -> Iterator[str]:
    """The outermost fields that the type does not declare; without a type all fields, also the inner ones."""
    if isinstance(value, list):
        inner = declared.elementType if isinstance(declared, ArrayType) else None
        if declared is None or inner is not None:
            for item in value:
                yield from _paths(item, inner, f"{path}[]")
    elif isinstance(value, dict) and (declared is None or isinstance(declared, StructType)):
        types = None if declared is None else {field.name: field.dataType for field in declared.fields}
        for name, item in value.items():
            below = f"{path}.{name}" if path else name
            if types is None or name not in types:
                yield below
            if types is None or name in types:
                yield from _paths(item, None if types is None else types[name], below)


def _split_duplicates(sample: Sequence[SampleRecord]) -> tuple[list[SampleRecord], list[SampleRecord]]:
    """The records that deduplication keeps, and those whose stream and id occurred before. Records without id stay."""
    seen: set[tuple[str, bytes]] = set()
    kept: list[SampleRecord] = []
    dropped: list[SampleRecord] = []
    for record in sample:
        event_id = record.record.header(ID)
        key = (record.topic, event_id or b"")
        (dropped if event_id is not None and key in seen else kept).append(record)
        seen.add(key)
    return kept, dropped


def _to_raw(session: SparkSession, sample: Sequence[SampleRecord]) -> DataFrame:
    batches = [to_arrow(Batch(one.topic, one.partition, [int(one.offset)], [one.record]), RAW_SCHEMA) for one in sample]
    table = pa.Table.from_batches(batches) if batches else RAW_SCHEMA.empty_table()
    return session.createDataFrame(table.combine_chunks(), RAW)


def _run(settings: TrialSettings) -> TrialResult:
    """Start Spark and try the pipe. Every failure is in the result."""
    java: Any = None
    scratch = settings.data.absolute()
    tell = (scratch / PHASE).write_text
    try:
        chosen = load_pipes(settings)
        broker = open_spark_broker(settings.broker, chosen.file)
        # A sample is one small batch in memory: no work for a cluster.
        local = settings.master_kind() is MasterKind.LOCAL and settings.master != AUTO
        master = settings.master if local else "local[2]"
        session = open_session(
            master=master,
            memory=settings.memory,
            kafka=False,
            databases=chosen.needs_databases,
            store=settings.object_store(chosen),
            scratch=scratch,
            compiler="quick",
            on_phase=tell,
        )
        tell("the transform is analysed, and runs on the sample")
        java = java_process(session)
        return try_pipe(session, settings, chosen, broker.max_record_bytes)
    except BadConfiguration as error:
        return TrialResult(problems=error.problems)
    except (JavaNotFound, JarsUnavailable, TableUnavailable) as error:
        return TrialResult(failed=str(error))
    except Exception as error:
        if java is None or not has_ended(java):
            return TrialResult(failed=f"Spark failed: {type(error).__name__}: {shorten(error)}")
        reason = f"the transform ended Spark: {why_ended(java.poll())}"
        hint = "Live, an event that does so becomes a dead letter after some restarts. Try: a smaller sample"
        return TrialResult(failed=f"{reason}. {hint}")


def has_ended(java: Any) -> bool:
    """Whether this process ends within ENDS_WITHIN_S."""
    try:
        java.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def main() -> int:
    """Exit status: 0 the result is written, 2 the settings are wrong."""
    try:
        settings = load_settings(TrialSettings, sys.argv[1:], os.environ)
    except BadConfiguration as error:
        return report_bad_configuration(error)
    configure_logs(TrialSettings.section, settings.log_level)
    written = settings.result.with_suffix(".new")
    written.write_bytes(msgspec.msgpack.encode(_run(settings)))
    written.replace(settings.result)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # Java may be gone, and then Python's own end may hang; the command line removes what is left
