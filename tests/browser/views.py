"""Views as the observer would make them, with everything in them that the page knows to show."""

import math

from services.core.group_report import GroupReport
from services.core.story.model import EventStory, Lane, Moment, Passage, PipeStory, Searched, SearchedTopic, Story
from services.core.times import format_time
from services.observer.transforms import TransformView
from services.observer.view import (
    CauseView,
    DestinationView,
    DurationRow,
    FieldView,
    GroupView,
    LagRow,
    LossCell,
    LossRow,
    PipeView,
    ShardView,
    View,
)

NOW_MIN = 29_300_000
HOSTILE = "<img src=x onerror=alert(1)>"


def make_view(*, at_ms: int = NOW_MIN * 60_000, per_second: float = 1000, catching_up: bool = False) -> View:
    """Four pipes: one with a loss and a destination that is down, two that are well, one with a hostile name."""
    pipes = (make_lossy(per_second), make_well("invoices"), make_well(HOSTILE), make_well("live"))
    groups = (
        GroupView("ingest", 2, None),
        GroupView("transform", 1, 420),
        GroupView("expel", 2, 0),
        GroupView("retrier", 1, 0),
    )
    scaling = (
        GroupReport(
            "expel",
            at_ms - 9_000,
            3,
            4,
            "hold",
            "frozen",
            "out: 2.1 cores for a target of 1.8; frozen",
            working=2,
            failed=("expel-3 (starts again and again)",),
            frozen=f"frozen by ana@desk since 14:00 because: {HOSTILE}",
            hot="partition 3 of orders.out (group orders.crm) has 96% of the lag: 12740 records, 61 s; key 'shop-7'",
        ),
        GroupReport("ingest", at_ms - 9_000, 2, 2, "hold", "cpu", "0.9 cores for a target of 1.0", working=2),
        GroupReport("retrier", at_ms - 900_000, 1, 1, "hold", "at_min", "0.1 cores for a target of 0.6", working=1),
    )
    return View(at_ms, 0.01, catching_up, pipes, groups, scaling=scaling)


def make_lossy(per_second: float) -> PipeView:
    """1,500 of one minute's events are missing behind the transform; a webhook is down."""
    loss = [_row(minute) for minute in range(NOW_MIN - 40, NOW_MIN)]
    steps = ("ingest", "transit", "transform", "expel")
    durations = tuple(
        DurationRow(minute, (4.0, 12 + 3 * math.sin(minute), 380 + 60 * math.sin(minute / 5), 30.0))
        for minute in range(NOW_MIN - 40, NOW_MIN)
    )
    lag = tuple(
        LagRow(
            minute, 410 + 50 * math.sin(minute / 5), 560 + 90 * math.sin(minute / 4), 900 + 300 * math.sin(minute / 3)
        )
        for minute in range(NOW_MIN - 40, NOW_MIN)
    )
    causes = (
        CauseView("503 Service Unavailable", 12_210, NOW_MIN * 60_000 - 4_000, "o-88121"),
        CauseView("connection refused", 530, NOW_MIN * 60_000 - 61_000),
    )
    destinations = (
        DestinationView("billing", "delivering", "closed", 2_400_000, 0, 0, 0),
        DestinationView("crm-of-a-customer", "down for 12 min", "open", 1_800_000, 12_740, 0, 17, causes),
        DestinationView("archive", "paused by an operator", "closed", 900_000, 0, 40_210, 0),
    )
    reasons = (
        "2.50 % of the events of 14:12 were lost at transform",
        "destination crm-of-a-customer: breaker open for 12 min",
    )
    nodes = ("transform", "expel billing", "expel crm-of-a-customer")
    shards = (
        ShardView("orders.out", "orders.billing", 8, None, 0, 0),
        ShardView("orders.out", "orders.crm-of-a-customer", 8, 3, 12_740, 61_000),
    )
    fields = (
        FieldView("ingest of orders", "price", 1.0, 0.02, 811, 12.5, ""),
        FieldView("expel to billing", "price", 1.0, 0.61, 790, 12.4, "price: null in 61%, 2% before"),
    )
    return PipeView(
        "orders",
        "unstable",
        reasons,
        per_second,
        nodes,
        tuple(loss),
        steps,
        durations,
        lag,
        destinations,
        shards,
        fields,
        TransformView(996.4, 4.9, 187.0, 612, 913.0, 420, 81_204, 19_300_000, 4, "http://127.0.0.1:4040", False),
    )


def _row(minute: int) -> LossRow:
    age = NOW_MIN - minute
    if age <= 2:
        cells = (LossCell(310 * (3 - age), "open"), LossCell(540, "open"), LossCell(0, "behind"))
        return LossRow(minute, 60_000, cells, 0.0, "open")
    if age == 4:  # one destination is behind, another was given up, and the transform has lost some
        cells = (LossCell(1_200, "final"), LossCell(540, "behind"), LossCell(77, "unknown"))
        return LossRow(minute, 60_000, cells, 0.02, "behind")
    missing = 1_500 if age == 28 else 3 if age == 11 else 0
    cells = (LossCell(missing, "final"), LossCell(0, "final"), LossCell(0, "final"))
    return LossRow(minute, 60_000, cells, missing / 60_000, "final", late=12 if age == 11 else 0)


def make_well(name: str) -> PipeView:
    """Nothing to see."""
    loss = tuple(
        LossRow(minute, 1200, (LossCell(0, "final"),), 0.0, "final") for minute in range(NOW_MIN - 10, NOW_MIN - 2)
    )
    destination = DestinationView("books", "delivering", "closed", 9_600, 0, 0, 0)
    lag = tuple(LagRow(minute, 8, 21, 44) for minute in range(NOW_MIN - 10, NOW_MIN))
    durations = tuple(DurationRow(minute, (3.0, 4.0, 9.0)) for minute in range(NOW_MIN - 10, NOW_MIN))
    steps = ("ingest", "transit", "expel")
    hostile = TransformView(20, 1, None, 0, None, None, 0, 0, 0, f"javascript:alert(1)//{HOSTILE}", False)
    live = TransformView(5_000, 0.1, 15_013.0, 15_013, 31.0, 9, 0, 0, 0, "", True)
    transform = {HOSTILE: hostile, "live": live}.get(name)
    return PipeView(
        name, "healthy", (), 20, ("expel books",), loss, steps, durations, lag, (destination,), transform=transform
    )


def make_story(event_id: str, *, is_known: bool) -> Story:
    """An event that passed a transform, was delivered once, and waits for another destination whose answer is hostile."""
    first, last = format_time(NOW_MIN * 60_000 - 86_400_000), format_time(NOW_MIN * 60_000)
    topics = (SearchedTopic("orders", complete=is_known, back_to=None if is_known else last),)
    searched = Searched(first, last, 12_000, is_known, is_known, topics)
    handed_over = Moment(
        at=last,
        what="handed_over",
        text=f"4 attempts failed, the last with http_503 ({HOSTILE}); next due {last}",
        position="penstock.retry-in:0:41",
        attempts=4,
    )
    lanes = (
        Lane("billing", "delivered", f"delivered (2xx) at the first attempt, reported {last}", None, ()),
        Lane(HOSTILE, "waiting", f"waits for another attempt since {first}, next due {last}", None, (handed_over,)),
    )
    passage = Passage("passed", "passed on to orders.out:1:55", last, ("orders.out:1:55",), ())
    event = EventStory(
        stream="orders",
        partition=3,
        offset="117",
        accepted=first,
        event_time=first,
        origin=HOSTILE,
        bytes=1042,
        made_by=None,
        copied_by=(),
        pipes=(PipeStory("large-orders", passage, lanes),),
    )
    return Story(event_id, (event,) if is_known else (), searched)
