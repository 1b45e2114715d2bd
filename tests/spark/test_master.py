"""What follows from the kind of master, and what cannot work on a cluster is refused before Spark starts."""

import json
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.core.yaml_source import BadConfiguration
from spark.cluster import executor_pod
from spark.cluster.master import (
    DriverAddress,
    Executors,
    MasterKind,
    cluster_settings,
    kind_of,
    parse_executors,
    write_code,
)
from spark.jobs.start_checks import missing_slots, why_no_state
from spark.settings import TransformSettings, check_master, check_tables, load_pipes


@pytest.mark.parametrize(
    ("master", "kind"),
    [
        ("local", MasterKind.LOCAL),
        ("local[*]", MasterKind.LOCAL),
        ("local[4,2]", MasterKind.LOCAL),
        ("spark://one:7077,two:7077", MasterKind.STANDALONE),
        ("k8s://https://10.0.0.1:443", MasterKind.KUBERNETES),
        ("yarn", MasterKind.YARN),
    ],
)
def test_kinds(master: str, kind: MasterKind) -> None:
    """If this fails, a master gets the settings of another kind."""
    assert kind_of(master) is kind


@pytest.mark.parametrize("master", ["", "local[]", "local-cluster[2,1,1024]", "spark://one", "mesos://one:5050"])
def test_what_is_no_master(master: str) -> None:
    """If this fails, a mistyped master is an error of Java after seconds."""
    with pytest.raises(ValueError, match="Try: local"):
        kind_of(master)


def test_numbers_of_executors() -> None:
    """If this fails, a cluster gets another number of executors than the operator wrote."""
    assert (parse_executors("4"), parse_executors("2-10")) == ((4, 4), (2, 10))
    for wrong in ("", "0", "0-3", "5-2", "-1", "many", "2-", "1.5"):
        with pytest.raises(ValueError, match="is no number of executors"):
            parse_executors(wrong)


def test_a_fixed_and_a_changing_number() -> None:
    """If this fails, a standalone master gives all its cores to one service, or Spark asks for no more executors under load."""
    driver, memory = DriverAddress("10.0.0.5", "0.0.0.0", 7000), 1 << 30
    fixed = cluster_settings(MasterKind.STANDALONE, driver, Executors(3, 3, 2, memory, "python3"))
    assert fixed["spark.cores.max"] == "6"
    assert fixed["spark.executor.cores"] == "2"
    assert fixed["spark.dynamicAllocation.maxExecutors"] == "3"
    assert fixed["spark.dynamicAllocation.initialExecutors"] == "0", (
        "a driver that stands by takes what the other one needs"
    )
    assert (fixed["spark.driver.host"], fixed["spark.driver.bindAddress"]) == ("10.0.0.5", "0.0.0.0")
    assert (fixed["spark.driver.port"], fixed["spark.driver.blockManager.port"]) == ("7000", "7001")
    changing = cluster_settings(MasterKind.YARN, DriverAddress("", "", 0), Executors(2, 9, 2, memory, "python3"))
    assert changing["spark.dynamicAllocation.minExecutors"] == "2"
    assert changing["spark.dynamicAllocation.maxExecutors"] == "9"
    assert changing["spark.authenticate"] == "true"
    assert not changing.keys() & {
        "spark.cores.max",
        "spark.driver.host",
        "spark.driver.port",
        "spark.executor.instances",
    }


@pytest.mark.parametrize(
    ("settings", "environ", "problem"),
    [
        ({"master": "spark://one:7077", "broker": "log:///var/log"}, {}, "the embedded log is a folder of this one"),
        (
            {"master": "spark://one:7077", "broker": "kinesis://eu-west-1"},
            {},
            "a folder that all hosts of the cluster mount",
        ),
        ({"master": "k8s://https://one", "broker": "kafka://one:9092"}, {}, "Kubernetes needs it"),
        ({"master": "yarn", "broker": "kafka://one:9092"}, {}, "HADOOP_CONF_DIR"),
        ({"master": "yarn", "broker": "kafka://one:9092"}, {"YARN_CONF_DIR": "/etc/hadoop/conf"}, None),
        (
            {"master": "spark://one:7077", "broker": "kafka://one:9092", "spark_ui": "127.0.0.1:4040"},
            {},
            "Try: driver_host",
        ),
        (
            {
                "master": "spark://one:7077",
                "broker": "kafka://one:9092",
                "spark_ui": "127.0.0.1:4040",
                "driver_host": "10.0.0.5",
            },
            {},
            None,
        ),
        ({"master": "local[2]", "broker": "log:///var/log", "spark_ui": "127.0.0.1:4040"}, {}, None),
        ({"master": "local[2]", "broker": "log:///var/log"}, {}, None),
        ({"master": "spark://one:7077", "broker": "kafka://one:9092"}, {}, None),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], environ: dict[str, str], problem: str | None) -> None:
    """If this fails, a service on a cluster fails on every batch, and its error names no cause."""
    if problem is None:
        check_master(TransformSettings(**settings), environ)
        return
    with pytest.raises(BadConfiguration, match=problem):
        check_master(TransformSettings(**settings), environ)


@pytest.mark.parametrize(
    ("master", "place", "refused"),
    [
        ("spark://one:7077", "names", True),
        ("yarn", "file:///mnt/names", True),
        ("yarn", "s3a://bucket/names", False),
        ("local[2]", "names", False),
    ],
)
def test_a_table_that_executors_cannot_read_is_refused(tmp_path: Path, master: str, place: str, refused: bool) -> None:
    """If this fails, a table on a cluster is never found, and its pipes wait for ever."""
    path = tmp_path / "pipes.yaml"
    path.write_text(
        f"""version: 1
streams: {{s: {{}}, t: {{}}}}
tables:
  names: {{parquet: "{place}", columns: "n INT"}}
pipes:
  p: {{sources: [s], transform: {{tables: [names], sql: SELECT * FROM s}}, destinations: [{{name: d, stream: t}}]}}
"""
    )
    settings = TransformSettings(master=master, pipes=path)
    selected = load_pipes(settings)
    if not refused:
        check_tables(settings, selected)
        return
    with pytest.raises(BadConfiguration) as caught:
        check_tables(settings, selected)
    (found,) = caught.value.problems
    assert str(found).startswith(f"{path}:4: tables.names.parquet: the executors of {master} are on other hosts")


def test_the_code_for_executors_is_that_of_the_wheel(tmp_path: Path) -> None:
    """If this fails, executors lack a module or a file that the driver has."""
    path = tmp_path / "code.zip"
    write_code(path)
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    assert {"spark/records.py", "services/core/jvm/jars.lock", "services/core/broker/log/blocking.py"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests", "bench", "infra"))]


def test_real_time_partitions_need_slots_on_a_cluster_too() -> None:
    """If this fails, a real-time query on a cluster waits for ever for a slot that nobody will give it."""
    cluster = TransformSettings(master="spark://one:7077", executors="2-9", executor_cores=2)
    assert missing_slots(cluster, 3) == []
    (problem,) = missing_slots(cluster, 4)
    assert "2-9 executors with executor_cores 2 runs 4 tasks at once" in str(problem)
    (problem,) = missing_slots(TransformSettings(master="local[4]"), 4)
    assert "Try: local[5]" in str(problem)


def test_state_needs_a_folder_that_executors_see() -> None:
    """If this fails, each executor keeps its own part of a transform's state, and loses it with its host."""
    stateful: Any = SimpleNamespace(row_by_row=False, deduplicates=False)
    deduplicating: Any = SimpleNamespace(row_by_row=True, deduplicates=True)
    neither: Any = SimpleNamespace(row_by_row=True, deduplicates=False)
    cluster = TransformSettings(master="spark://one:7077")
    assert "Try: --checkpoints" in (why_no_state(cluster, stateful) or "")
    assert why_no_state(cluster, deduplicating) is not None
    assert why_no_state(cluster, neither) is None
    assert why_no_state(TransformSettings(master="spark://one:7077", checkpoints="s3a://a/b"), stateful) is None
    assert why_no_state(TransformSettings(), stateful) is None


def test_executors_have_the_account_of_the_drivers_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, pods of executors run as `default`: what a cloud allows the transform (state in S3, Kinesis) is refused to
    them."""
    monkeypatch.setattr("spark.cluster.master._ACCOUNT", tmp_path)
    monkeypatch.setenv("HOSTNAME", "transform-1")
    driver, executors = DriverAddress("10.0.0.5", "", 7078), Executors(1, 1, 1, 1 << 30, "python", "image")
    outside = cluster_settings(MasterKind.KUBERNETES, driver, executors)
    assert not [name for name in outside if name.startswith("spark.kubernetes.authenticate")]
    for name in ("transform", "a", "of-a-fleet"):  # texts of Base64 with and without padding
        claims = json.dumps({"sub": f"system:serviceaccount:penstock:{name}"}).encode()
        token = ".".join(urlsafe_b64encode(part).decode().rstrip("=") for part in (b"{}", claims, b"signature"))
        (tmp_path / "token").write_text(token)
        (tmp_path / "namespace").write_text("penstock")
        found = cluster_settings(MasterKind.KUBERNETES, driver, executors)
        assert found["spark.kubernetes.authenticate.executor.serviceAccountName"] == name
        assert found["spark.kubernetes.namespace"] == "penstock"
        assert found["spark.kubernetes.driver.pod.name"] == "transform-1"


def test_an_executor_in_a_pod_is_what_spark_asked_for(tmp_path: Path) -> None:
    """If this fails, pods of executors end at once, or run with the rights of root."""
    asked = {variable: f"of {variable}" for variable in executor_pod._ARGUMENTS.values()}
    options = {f"SPARK_JAVA_OPT_{number}": f"-Dn={number}" for number in range(12)}
    environ = {**asked, **options, "SPARK_EXECUTOR_MEMORY": "1024m", "SPARK_CONF_DIR": "/opt/spark/conf"}
    command = executor_pod.executor_command(Path("/java/bin/java"), environ)
    assert command[:13] == ["/java/bin/java", *(f"-Dn={number}" for number in range(12))]
    assert command[13:16] == ["-Xms1024m", "-Xmx1024m", "-cp"]
    assert command[16].startswith("/opt/spark/conf:")
    assert command[command.index("--driver-url") + 1] == "of SPARK_DRIVER_URL"
    assert command[command.index("--podName") + 1] == "of SPARK_EXECUTOR_POD_NAME"
    with pytest.raises(KeyError):
        executor_pod.executor_command(Path("java"), options)
    template = tmp_path / "executor.json"
    executor_pod.write_template(template)
    pod = json.loads(template.read_text())
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["containers"][0]["command"][-1] == "spark.cluster.executor_pod"
