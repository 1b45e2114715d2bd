"""Settings of the transform service, and the pipes that it runs."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from services.core.http.address import parse_address
from services.core.pipe_file.pipes import PipeFile, read_pipes
from services.core.pipe_file.table import Table, not_on_cluster
from services.core.process.settings import Settings
from services.core.units import Duration, Size
from services.core.yaml_source import BadConfiguration, Document, Problem
from spark.cluster.master import AUTO, AUTO_SLOTS, DriverAddress, Executors, MasterKind, kind_of, parse_executors
from spark.object_store import SCHEME, ObjectStore, parse_checkpoints

_LEAST_MEMORY = 480 << 20
"""Spark wants 450 MiB of heap. Java's serial collector leaves out a thirtieth of what it gets."""


def _enough(memory: int) -> int:
    if memory < _LEAST_MEMORY:
        raise ValueError("Spark needs at least 480MiB. Try: 1GiB")
    return memory


def _address_or_none(text: str) -> str:
    if text:
        parse_address(text)
    return text


def _valid(parse: Callable[[str], object]) -> AfterValidator:
    """The text as it is, when it can be parsed."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


class TransformSettings(Settings):
    """The transform service: runs the Spark transforms of the pipes."""

    section: ClassVar[str] = "transform"

    data: Path = Field(
        Path("/var/lib/penstock"), description="Data folder. The checkpoints and Spark's temporary files are in it."
    )
    checkpoints: Annotated[str, _valid(parse_checkpoints)] = Field(
        "",
        description="Folder or object-store URI (s3a://bucket/…) of the checkpoints; empty: checkpoints/ in the data folder.",
    )
    s3_endpoint: str = Field("", description="URL of the object store of checkpoints and tables; empty: that of AWS.")
    s3_region: str = Field(
        "", description="Region of these buckets; empty: AWS_REGION, else the region that AWS reports."
    )
    s3_path_style: bool = Field(
        False, description="Whether requests name the bucket in the path, as most stores but AWS need."
    )
    only: str = Field("", description="Pipes to run, names joined by commas; empty: every pipe with a transform.")
    master: Annotated[str, _valid(kind_of)] = Field(
        AUTO,
        description="Spark master: local[N] runs N tasks at once in this process; auto: local[2], or more where real-time mode "
        "needs a task for each partition; spark://host:7077, k8s://https://host:443 or yarn run them in executors of a cluster "
        "(docs/clusters.md).",
    )
    executors: Annotated[str, _valid(parse_executors)] = Field(
        "2",
        description="Number of executors on a cluster. E.g. 4: up to 4 are requested when there is work, and kept. E.g. 2-10: at "
        "least 2, and idle executors are released. With control_token_file: as many as the autoscaler orders.",
    )
    control_token_file: Path | None = Field(
        None,
        description="A file with a token, not readable by others. A client that sends it to the management port may set the "
        "number of executors.",
    )
    executor_cores: int = Field(2, ge=1, description="Tasks that an executor runs at once.")
    executor_memory: Annotated[Size, AfterValidator(_enough)] = Field(
        1 << 30, description="Heap of an executor, at least 480MiB, e.g. 2GiB."
    )
    executor_python: str = Field(
        "", description="Path of Python on the executors' hosts; empty: the path of this process's Python."
    )
    executor_image: str = Field(
        "", description="Container image of the executors; only on Kubernetes, and needed there."
    )
    driver_host: str = Field(
        "", description="Name or address at which executors reach this process; empty: this host's address."
    )
    driver_bind: str = Field("", description="Address on which the driver listens; empty: that of driver_host.")
    driver_port: int = Field(
        0, ge=0, le=65534, description="Port of the driver; the next one is for blocks. 0: any two free ports."
    )
    batch_timeout: Duration = Field(
        300.0,
        description="Time limit of a batch, e.g. 5m; a tenth of it for each part of a batch that is done in parts, "
        "half of it for a pipe's first part in a process. Beyond the "
        "limit the process ends, and its supervisor starts it again.",
    )
    memory: Annotated[Size, AfterValidator(_enough)] = Field(
        1 << 30, description="Heap of Spark's driver, at least 480MiB, e.g. 1GiB."
    )
    java_compiler: str = Field(
        "auto",
        pattern="^(auto|full|quick)$",
        description="auto, full or quick. full: Java compiles for a minute or two beside the first events, and then needs a "
        "quarter less CPU. quick: for few events, or one core. auto: full, unless there is one core.",
    )

    spark_ui: Annotated[str, AfterValidator(_address_or_none)] = Field(
        "",
        description="host:port of Spark's own web pages, e.g. 127.0.0.1:4040; empty: none. They have no password and show the "
        "transforms: keep them on loopback. On a cluster driver_host is needed beside it.",
    )

    @classmethod
    def program(cls) -> str:
        return "python -m spark"

    def checkpoint_root(self) -> str:
        """An absolute path, or an s3a URI."""
        if urlsplit(self.checkpoints).scheme:
            return self.checkpoints.rstrip("/")
        return str(Path(self.checkpoints).absolute() if self.checkpoints else self.data.absolute() / "checkpoints")

    def object_store(self, selected: "SelectedPipes | None" = None) -> ObjectStore | None:
        """Of the checkpoints, and of the tables of these pipes. None: all are elsewhere."""
        if not urlsplit(self.checkpoints).scheme and not (selected is not None and selected.needs_object_store):
            return None
        return ObjectStore(self.s3_endpoint, self.s3_region, self.s3_path_style)

    def master_kind(self) -> MasterKind:
        return kind_of(self.master)

    def driver_address(self) -> DriverAddress:
        return DriverAddress(self.driver_host, self.driver_bind, self.driver_port)

    def executor_settings(self) -> Executors:
        """Of a cluster; meaningless on a local master."""
        least, most = parse_executors(self.executors)
        python = self.executor_python or sys.executable
        return Executors(
            least,
            most,
            self.executor_cores,
            self.executor_memory,
            python,
            self.executor_image,
            self.control_token_file is not None,
        )

    def selected(self) -> frozenset[str]:
        """The names in `only`."""
        return frozenset(name.strip() for name in self.only.split(",") if name.strip())


def check_master(settings: TransformSettings, environ: Mapping[str, str] = os.environ) -> None:
    """Before Spark starts: can this master work here? Raises BadConfiguration with every mistake."""
    kind, problems = settings.master_kind(), []
    if kind is MasterKind.LOCAL:
        return
    if urlsplit(settings.broker).scheme == "log":
        text = (
            f"the executors of {settings.master} run on other hosts, and the embedded log is a folder of this one. "
            "Try: master: local[4], or a broker on Kafka"
        )
        problems.append(Problem("master", "", text))
    if urlsplit(settings.broker).scheme == "kinesis" and not settings.checkpoints:
        text = (
            "beside the checkpoint, executors note how far they have read Kinesis, but the default folder is on this host only. "
            "Try: an object store, or a folder that all hosts of the cluster mount"
        )
        problems.append(Problem("checkpoints", "", text))
    if kind is MasterKind.KUBERNETES and not settings.executor_image:
        problems.append(Problem("executor_image", "", "Kubernetes needs it. Try: the image of this container"))
    if kind is MasterKind.YARN and not {"HADOOP_CONF_DIR", "YARN_CONF_DIR"} & environ.keys():
        text = "yarn needs the variable HADOOP_CONF_DIR. Try: /etc/hadoop/conf, where EMR has it"
        problems.append(Problem("master", "", text))
    if settings.spark_ui and not settings.driver_host:
        text = (
            "without driver_host, Spark tells the executors that its web pages' address is the driver's. Try: driver_host: the "
            "address at which executors reach this host"
        )
        problems.append(Problem("spark_ui", "", text))
    if problems:
        raise BadConfiguration(problems)


def check_tables(settings: TransformSettings, selected: "SelectedPipes") -> None:
    """Before Spark starts: can executors read these tables? Raises BadConfiguration with every mistake."""
    if settings.master_kind() is MasterKind.LOCAL:
        return
    problems = [
        selected.document.problem(("tables", name, "parquet"), not_on_cluster(settings.master))
        for name, table in selected.tables().items()
        if table.is_on_this_host
    ]
    if problems:
        raise BadConfiguration(problems)


MOST_REAL_TIME_SLOTS = 32
"""Of the master `auto`. Pipes that need more run in micro-batches: each slot has a thread, and a consumer with its buffers."""


def size_master(settings: TransformSettings, selected: "SelectedPipes") -> TransformSettings:
    """`auto` as a master that Spark knows: two slots, and one for each partition that may be read in real-time mode."""
    if settings.master != AUTO:
        return settings
    needed = 0
    for name in selected.names if urlsplit(settings.broker).scheme == "kafka" else ():
        pipe = selected.file.pipes[name]
        if pipe.transform is not None and pipe.transform.may_be_real_time:
            streams = (selected.file.streams[source] for source in pipe.sources)
            needed += sum(max(stream.partitions, stream.max_partitions or 0) for stream in streams)
    return settings.model_copy(update={"master": f"local[{AUTO_SLOTS + min(needed, MOST_REAL_TIME_SLOTS)}]"})


@dataclass(frozen=True, slots=True)
class SelectedPipes:
    """A pipe file and the names of the pipes to run; each of these has a transform. document: for messages with lines."""

    document: Document
    file: PipeFile
    names: list[str]

    @property
    def needs_databases(self) -> bool:
        """Whether one of them reads a table from a database."""
        return any(table.jdbc is not None for table in self.tables().values())

    @property
    def needs_object_store(self) -> bool:
        """Whether one of them reads a table from an object store."""
        return any(urlsplit(table.parquet or "").scheme == SCHEME for table in self.tables().values())

    def tables(self) -> dict[str, Table]:
        """The tables that they read, by name."""
        transforms = [self.file.pipes[name].transform for name in self.names]
        names = dict.fromkeys(table for transform in transforms if transform is not None for table in transform.tables)
        return {name: self.file.tables[name] for name in names}


def load_pipes(settings: TransformSettings) -> SelectedPipes:
    """Blocking. Raises BadConfiguration with every mistake."""
    document, file, problems = read_pipes(settings.pipes)
    known = sorted(name for name, pipe in file.pipes.items() if pipe.transform is not None)
    selected = settings.selected() or frozenset(known)
    remedy = f"Try: {', '.join(known) or 'none there'}"
    for name in sorted(selected - set(known)):
        problems.append(Problem("only", "", f"{name!r} is no pipe with a transform in {document.path}. {remedy}"))
    if problems:
        raise BadConfiguration(problems)
    return SelectedPipes(document, file, sorted(selected))
