"""`python -m spark` as the supervisor runs it: killed, stopped, misconfigured, without memory."""

import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import orjson
import psutil
import pytest

from services.core.broker.log import blocking
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.topics import delete_topic
from services.core.broker.record import Record
from services.core.control.pauses import Pause
from services.core.event import read_id
from services.core.pipe_file.topic_names import CONTROL
from services.core.undelivered import dead_letter
from tests.spark.log_pipeline import event, numbers, wait_for
from tests.spark.service_process import LogService, TooLateError
from tests.support.pacing import Pace

pytestmark = pytest.mark.spark
PORT_FILE = "management_port_open"
PIPES = """
version: 1
streams:
  s: {columns: "delay INT"}
pipes:
  p:
    sources: [s]
    transform:
      sql: SELECT event, delay FROM s WHERE delay % 2 = 0
      max_events: 100
      interval: 50ms
    destinations: [{name: d, webhook: {url: "https://example.com/"}}]
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LogService]:
    with LogService(tmp_path, PIPES, ["p"]) as service:
        yield service


def flights(numbers: Iterable[int]) -> list[Record]:
    return [event(n, orjson.dumps({"delay": n})) for n in numbers]


def count(service: LogService) -> int:
    """The records that came out."""
    return sum(held.end for held in blocking.ends(service.log, "p.out").values())


def management(service: LogService) -> str:
    """Its address, from its log; waits for it."""

    def address() -> str | None:
        lines = (line for line in service.output.read_text().splitlines() if PORT_FILE in line)
        return next((str(orjson.loads(line)["address"]) for line in lines), None)

    wait_for(lambda: address() is not None, "the management port")
    return address() or ""


def test_killed_in_the_middle(service: LogService) -> None:
    """If this fails, a killed transform loses events, writes some twice, or reports other events than it did."""
    service.send(flights(range(3000)))
    driver = service.start()
    wait_for(lambda: count(service) >= 250, "250 records")
    driver.kill()  # alone: what it started has to notice
    driver.wait(600)
    TooLateError.check(count(service), 1500)
    service.start()
    wait_for(lambda: count(service) >= 750, "750 records")
    service.kill()
    TooLateError.check(count(service), 1500)
    service.start()
    wait_for(lambda: count(service) >= 1500, "all records")
    wait_for(lambda: len(numbers(service.reports(), "passed")) >= 1500, "all reports")  # they follow the output
    (scratch,) = (service.folder / "scratch").glob("spark-*")  # those of both killed processes are gone
    assert {path.name.partition("-")[0] for path in scratch.iterdir()} >= {"spark", "blockmgr", "artifacts"}
    counts = Counter(service.ids("p.out"))
    assert counts == Counter(f"id-{n}" for n in range(0, 3000, 2))
    assert not service.records("p.dead")
    reports = service.reports()
    assert len({report.instance for report in reports}) == 3
    assert numbers(reports, "passed") == set(range(0, 3000, 2))
    assert numbers(reports, "filtered") == set(range(1, 3000, 2))
    assert not numbers(reports, "dead")


def change_pause(service: LogService, state: Literal["paused", "resumed"]) -> None:
    """As `penstock pause p` and `penstock resume p` do."""
    pause = Pause(state, "operator", "ann", 0, "wrong VAT")
    blocking.append(service.log, CONTROL, {0: [Record(b"pause:p", orjson.dumps(msgspec.to_builtins(pause)), 0)]})


def listening(pid: int) -> set[tuple[str, int]]:
    """The addresses at which a process and those that it started can be reached."""
    process = psutil.Process(pid)
    sockets = [one for each in (process, *process.children(recursive=True)) for one in each.net_connections("inet")]
    return {(one.laddr.ip, one.laddr.port) for one in sockets if one.status == psutil.CONN_LISTEN}


def test_ready_and_stopped(service: LogService) -> None:
    """If this fails, the supervisor cannot tell when transforms run, or a stop loses or repeats a batch; or a paused pipe starts,
    and looks broken; or Spark's own pages are not where the page's link says, or open to other hosts."""
    service.send(flights(range(1000)))
    change_pause(service, "paused")
    process = service.start("--management", "127.0.0.1:0", "--spark-ui", "127.0.0.2:0")
    address = management(service)

    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=300) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    assert get("/healthz")[0] == 200
    wait_for(lambda: get("/readyz")[0] == 200, "readiness")
    assert orjson.loads(get("/readyz")[1])["note"] == "p: paused by ann: wrong VAT"
    wait_for(lambda: 'penstock_broker_lag_records{group="p"' in get("/metrics")[1], "the lag of a paused pipe")
    assert 'penstock_transform_paused{pipe="p"} 1.0' in get("/metrics")[1]
    assert count(service) == 0
    change_pause(service, "resumed")
    wait_for(lambda: 'penstock_transform_events_read_total{pipe="p"} 1000.0' in get("/metrics")[1], "1000 events read")
    lag = 'penstock_broker_lag_records{group="p",partition="%d",topic="s"} 0.0'
    wait_for(lambda: all(lag % partition in get("/metrics")[1] for partition in (0, 1)), "no event waits")
    assert orjson.loads(get("/readyz")[1]) == {"ready": True, "reason": None, "pid": service.pid}
    metrics = get("/metrics")[1]
    assert 'penstock_transform_query_up{pipe="p"} 1.0' in metrics
    assert 'penstock_transform_events_written_total{pipe="p"} 500.0' in metrics
    assert 'penstock_lag_out_seconds_count{node="transform",pipe="p"} 500.0' in metrics
    wait_for(lambda: any(report.spark for report in service.reports()), "figures for the page")
    ui = next(report.spark.ui for report in service.reports() if report.spark)
    with urllib.request.urlopen(f"{ui}/StreamingQuery/", timeout=300) as answer:
        assert "Streaming Query" in answer.read().decode()
    assert ui.startswith("http://127.0.0.2:")
    assert {host.removeprefix("::ffff:") for host, _ in listening(process.pid)} <= {"127.0.0.1", "::1", "127.0.0.2"}
    assert int(ui.rpartition(":")[2]) in {port for _, port in listening(process.pid)}
    wait_for(lambda: 'penstock_spark_tasks_total{outcome="succeeded"}' in get("/metrics")[1], "figures of tasks")
    assert 'penstock_transform_batch_seconds_total{phase="addBatch",pipe="p"}' in get("/metrics")[1]
    delete_topic(DataFolder.prepare(service.log), "s")
    wait_for(lambda: get("/readyz")[0] == 503, "a query that fails makes it unready")
    failures, pace = re.compile(r'penstock_transform_query_failures_total\{pipe="p"\} (\d+)\.0'), Pace()
    while (found := failures.search(get("/metrics")[1])) is None or int(found[1]) < 3:
        assert get("/readyz")[0] == 503
        pace.rest_blocking()
    assert 'penstock_transform_query_up{pipe="p"} 0.0' in get("/metrics")[1]
    process.terminate()
    assert process.wait(600) == 0, service.output.read_text()
    assert count(service) == 500
    assert not list((service.folder / "scratch").glob("spark-*"))


def test_bad_transform_is_named(service: LogService) -> None:
    """If this fails, a mistake in SQL is found by the first event, not at the start, or without its place."""
    pipes = service.folder / "pipes.yaml"
    pipes.write_text(PIPES.replace("SELECT event, delay", "SELECT event, dely"))
    process = service.start()
    assert process.wait(600) == 2
    said = service.output.read_text()
    assert f"error: {pipes}:9: pipes.p.transform.sql: [UNRESOLVED_COLUMN.WITH_SUGGESTION]" in said
    assert "Traceback" not in said
    assert service.start("--only", "q").wait(600) == 2
    assert "'q' is no pipe with a transform" in service.output.read_text()


POISON = 7
MOST_STARTS = 7


@pytest.fixture
def two_pipes(tmp_path: Path) -> Iterator[LogService]:
    with LogService(tmp_path, TWO_PIPES, ["p", "q"], "--memory", "500MiB") as service:
        yield service


TWO_PIPES = f"""
version: 1
streams:
  s: {{columns: "delay INT"}}
pipes:
  p:
    sources: [s]
    transform: {{sql: "SELECT event, length(repeat('x', IF(delay = {POISON}, 2000000000, 1))) AS n FROM s"}}
    destinations: [{{name: d, webhook: {{url: "https://example.com/"}}}}]
  q:
    sources: [s]
    transform: {{sql: "SELECT event, delay FROM s"}}
    destinations: [{{name: d, webhook: {{url: "https://example.com/"}}}}]
"""


def test_an_event_that_takes_all_memory(two_pipes: LogService) -> None:
    """If this fails, one event of one pipe keeps Java alive without memory, or ends the process again and again: nothing of any
    pipe comes through."""
    healthy = {0, 1, 2, 3}
    two_pipes.send(flights([0, 1]))
    two_pipes.keep_running(MOST_STARTS)
    wait_for(lambda: len(two_pipes.ids("p.out")) == len(two_pipes.ids("q.out")) == 2, "both pipes at work")
    two_pipes.send(flights([POISON, 2, 3]))

    def done() -> bool:
        return len(two_pipes.ids("p.dead")) >= 1 and {f"id-{n}" for n in healthy} <= set(two_pipes.ids("p.out"))

    while not done():
        two_pipes.keep_running(MOST_STARTS)
        wait_for(
            lambda: done() or not two_pipes.is_running,
            "the culprit in the dead letters and the rest in the output, or the end",
        )
    wait_for(lambda: len(two_pipes.ids("q.out")) >= len(healthy) + 1, "all of the other pipe")
    assert Counter(two_pipes.ids("p.out")) == Counter(f"id-{n}" for n in healthy)
    assert Counter(two_pipes.ids("q.out")) == Counter(f"id-{n}" for n in [*healthy, POISON])
    [letter] = two_pipes.records("p.dead")
    assert (read_id(letter), letter.header(dead_letter.REASON)) == (f"id-{POISON}", b"transform_error")
    assert b"it ended the process 2 times" in (letter.header(dead_letter.DETAIL) or b"")
    assert not two_pipes.ids("q.dead")
    assert numbers([report for report in two_pipes.reports() if report.pipe == "p"], "dead") == {POISON}
    assert "it ran out of memory" in two_pipes.output.read_text()


def test_a_transform_that_never_ends(two_pipes: LogService) -> None:
    """If this fails, a transform that hangs holds its pipe for good, and looks healthy."""
    (two_pipes.folder / "never.py").write_text(
        "import time\nfrom pyspark.sql.functions import udf\n"
        "@udf('long')\ndef wait(n):\n    while True:\n        time.sleep(1)\n"
        "def never(frame):\n    return frame.select('event', wait('delay').alias('n'))\n"
    )
    pipes = two_pipes.folder / "pipes.yaml"
    transform = TWO_PIPES.split("transform: ")[1].split("\n")[0]
    pipes.write_text(TWO_PIPES.replace(transform, "{python: 'never.py:never'}"))
    two_pipes.send(flights(range(3)))
    assert two_pipes.start("--only", "p", "--batch-timeout", "5s").wait(600) == 1
    assert "has made no progress for" in two_pipes.output.read_text()
    assert "the process ends and starts again" in two_pipes.output.read_text()
