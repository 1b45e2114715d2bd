"""The number of series on the metrics page that one destination has: a fleet has a thousand destinations."""

import re
from pathlib import Path
from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from services.core import metrics
from services.core.broker.record import Record, TopicPartition
from services.core.http.failure import Failure
from services.core.lag import LagFamily
from services.core.security.oauth import GRANTED
from services.expel.circuit_breaker import MIN_ATTEMPTS
from services.expel.delivery import Delivery, OffsetRun
from services.expel.metrics import OTHER, LaneMetrics, WordCounter
from services.expel.retry_policy import fail_by_status
from services.expel.throttle import SendThrottle

IDLE, MOST, SIGNED, OBSERVED = 34, 97, 2, 8
"""For each destination and instance of expel, while nothing has failed and at most; for its signing keys or each credential; in
the observer. The numbers of docs/metrics.md, which has a sum for a thousand destinations."""
_PARTS_OF = {"pipe", "destination"}
_FEW = {"action": ["delivered_elsewhere", "buried", "dropped"], "node": ["ingest", "transform", "expel", "retrier"]}
"""Values of labels that the code lists. An observer's destination has steps of few nodes."""
_WORDS = [f"http_{status}" for status in range(100, 600)]


def _families() -> dict[str, Collector]:
    """Every metric that has series for each destination."""
    found: dict[str, Collector] = {}
    for name, value in vars(metrics).items():
        labels = value._label_names if isinstance(value, LagFamily) else getattr(value, "_labelnames", ())
        if "destination" in labels:
            assert isinstance(value, LagFamily | Counter | Gauge)
            found[name] = value
    return found


def _series(name: str) -> list[str]:
    registry = CollectorRegistry()
    for family in _families().values():
        registry.register(family)
    page = generate_latest(registry).decode()
    return [line for line in page.splitlines() if f'destination="{name}"' in line]


@pytest.fixture
def name() -> str:
    return f"d-{uuid4().hex[:8]}"


def _lane(name: str) -> LaneMetrics:
    SendThrottle("p", name)
    lane = LaneMetrics("p", name)
    lane.up.set(True)
    lane.paused.set(False)
    records = [Record(None, b"{}", number) for number in range(100)]
    runs = [OffsetRun(TopicPartition("s", 0), range(100), 1)]
    lane.record_polled(records, [number + 1 for number in range(100)], 5_000_000)
    lane.record_delivered(Delivery([b"{}"] * 100, [b""] * 100, range(1, 101), records, runs))
    lane.count_attempt(None)
    lane.flush()
    return lane


def _drive(name: str) -> None:
    """Every outcome that there may be, and every status."""
    lane = _lane(name)
    throttle, request = SendThrottle("p", name), Delivery([b"{}"], [b""], [1], [Record(None, b"{}", 0)], [])
    for _ in range(MIN_ATTEMPTS):
        throttle.begin(request)
        throttle.end(request, fail_by_status(503))
    throttle.update_gauge()
    for status in range(300, 600):
        lane.count_attempt(fail_by_status(status))
    for word in ("timeout", "dns", "tls", "connection"):
        lane.count_attempt(Failure(word, "", recoverable=True))
    lane.count_attempt({0: fail_by_status(404)})
    token = WordCounter(metrics.EXPEL_TOKEN_REQUESTS, "p", name, usual=[GRANTED])
    for word in _WORDS:
        token.add(word)
    for constant, family in _families().items():
        if not constant.startswith("EXPEL_") or not isinstance(family, Counter):
            continue
        [*more] = [label for label in family._labelnames if label not in _PARTS_OF]
        assert more in ([], ["reason"], ["outcome"], ["action"]), f"{constant}: how many series has a destination?"
        if constant == "EXPEL_TOKEN_REQUESTS":
            continue
        if not more:
            lane.count(family, 1)
        for value in _FEW.get(more[0], _WORDS) if more else []:
            lane.count(family, 1, value)


def test_a_destination_without_failures(name: str) -> None:
    """Broken: a metric for each destination costs a fleet thousands of series that nobody reads."""
    _lane(name)
    found = _series(name)
    assert len(found) == IDLE, "\n".join(found)


def test_a_destination_with_every_failure(name: str) -> None:
    """Broken: one receiver that answers with all statuses fills Prometheus, or a failure is not counted at all."""
    _drive(name)
    found = _series(name)
    assert len(found) == MOST, "\n".join(found)
    dead = [line for line in found if line.startswith("penstock_expel_events_dead_total")]
    assert sum(float(line.rpartition(" ")[2]) for line in dead) == len(_WORDS)
    assert f'reason="{OTHER}"' in "".join(dead)
    shown = {re.split(r"_(?:bucket|count|sum|total)?\{|\{", line)[0] for line in found}
    families = {constant: family for constant, family in _families().items() if not constant.startswith("LEDGER_")}
    names = {family.name if isinstance(family, LagFamily) else family._name for family in families.values()}  # type: ignore[attr-defined]
    assert shown == names, "a metric with the label destination was not driven"


def test_a_word_that_alerts_look_for_is_there_from_the_start(name: str) -> None:
    """Broken: a token server fails in many ways and recovers, and the alert does not end: its success counts as OTHER, or is the
    first sample of a series, in which Prometheus sees no increase."""
    token = WordCounter(metrics.EXPEL_TOKEN_REQUESTS, "p", name, usual=[GRANTED])
    ok = f'penstock_expel_token_requests_total{{destination="{name}",outcome="{GRANTED}",pipe="p"}}'
    assert _series(name) == [f"{ok} 0.0"]
    for word in _WORDS:
        token.add(word)
    token.add(GRANTED)
    assert f"{ok} 1.0" in _series(name)


def test_the_observer(name: str) -> None:
    """Broken: the observer's page grows with a label that has many values."""
    for constant, family in _families().items():
        if constant.startswith("LEDGER_"):
            assert isinstance(family, Counter | Gauge)
            more = [label for label in family._labelnames if label not in _PARTS_OF]
            assert more in ([], ["node"])
            for word in _FEW["node"] if more else [""]:
                family.labels(*[{"pipe": "p", "destination": name}.get(label, word) for label in family._labelnames])
    assert len(_series(name)) <= OBSERVED


def test_the_page_states_the_numbers() -> None:
    """Broken: somebody plans Prometheus by numbers that are wrong."""
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    for stated in (f"{IDLE} series", f"at most {MOST}", f"{OBSERVED} series", f"{SIGNED} series"):
        assert stated in page
