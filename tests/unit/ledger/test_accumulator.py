"""From records to sets of origins, against reading them one by one."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from services.core.broker.record import Headers, Record
from services.core.event import ARRIVAL, ID, ORIGIN
from services.core.ledger import accumulator
from services.core.ledger.accumulator import Accumulator, Sets
from services.core.ledger.report import MAX_NUMBER, Outcome, unpack_numbers

Found = dict[tuple[str, str, int], set[int]]
OUTCOMES: tuple[Outcome, ...] = ("delivered", "dead")
ODD = [
    b"",
    b":",
    b"a:0",
    b"a:0:",
    b"a:0:01",
    b"a:0:1,2",
    b"a:0:-1",
    b"a:0: 1",
    b"a:0:1e3",
    b"A:0:1",
    b"1a:0:5",
    b"\xff:0:1",
]
ODD += [b"a:0:%d" % MAX_NUMBER, b"a:0:99999999999999999999", b"a:x:1", b":0:1", b"a:0:1:2"]

origins = st.one_of(
    st.builds(
        lambda who, partition, number: b"%b:%d:%d" % (who, partition, number),
        st.sampled_from([b"a", b"1a", b"b"]),
        st.integers(0, 2),
        st.integers(0, MAX_NUMBER - 1),
    ),
    st.sampled_from(ODD),
    st.none(),
)
runs = st.builds(
    lambda who, first, count: [b"%b:3:%d" % (who, number) for number in range(first, first + count)],
    st.sampled_from([b"a", b"b"]),
    st.integers(0, 2000),
    st.integers(1, 60),
)
batches = st.lists(st.tuples(st.sampled_from(OUTCOMES), st.one_of(runs, st.lists(origins, max_size=8)), st.booleans()))


def make_record(origin: bytes | None, *, elsewhere: bool = False) -> Record:
    own: Headers = () if origin is None else ((ORIGIN, origin),)
    head: Headers = ((ID, b"x"), (ARRIVAL, b"1"))
    return Record(None, b"{}", 0, own + head if elsewhere else head + own)


def read_naively(batches: Sequence[tuple[Outcome, Sequence[bytes | None], bool]]) -> Found:
    """One origin after the other."""
    found: Found = {}
    for outcome, many, _ in batches:
        for origin in many:
            parts = (origin or b"").split(b":")
            if len(parts) != 3 or not (parts[0].isalnum() and parts[1].isdigit() and parts[2].isdigit()):
                continue
            if parts[0].lower() == parts[0] and len(parts[2]) <= 10 and int(parts[2]) < MAX_NUMBER:
                found.setdefault((outcome, parts[0].decode(), int(parts[1])), set()).add(int(parts[2]))
    return found


def unpack(sets: Sets) -> Found:
    return {
        (one.outcome, one.incarnation, one.partition): set(unpack_numbers(one.numbers))
        for one in sets.pack()
        if one.numbers
    }


def outside(pipe: str) -> float:
    names = "penstock_ledger_events_outside_total"
    return sum(
        REGISTRY.get_sample_value(names, {"node": "expel", "pipe": pipe, "reason": reason}) or 0.0
        for reason in ("no_origin", "bad_origin")
    )


@given(batches)
def test_finds_what_reading_one_by_one_finds(batches: list[tuple[Outcome, list[bytes | None], bool]]) -> None:
    """Broken: events count as missing that were delivered, or the other way round; or one odd header spoils a batch."""
    subject, before = Accumulator("expel", "oracle"), outside("oracle")
    for outcome, many, elsewhere in batches:
        subject.add(outcome, [make_record(origin, elsewhere=elsewhere) for origin in many])
    assert unpack(subject.drain()) == read_naively(batches)
    events = sum(len(many) for _, many, _ in batches)
    good = sum(
        sum(len(numbers) for numbers in read_naively([(o, [m], e)]).values()) for o, many, e in batches for m in many
    )
    assert outside("oracle") - before == events - good


def test_a_bare_number_is_no_origin() -> None:
    """Broken: a record of others, whose header happens to be a number, counts as an event of ours, and hides its loss."""
    subject = Accumulator("expel", "bare")
    subject.add("delivered", [make_record(one) for one in (b"a:0:1", b"2", b"a:0:3", b"a:0:4,a:0:5")])
    subject.add("delivered", [make_record(b"a:0:9,a:0:10")])
    subject.add("delivered", [make_record(b"a:0:6"), make_record(b"7")])
    assert unpack(subject.drain()) == {("delivered", "a", 0): {1, 3, 6}}


def test_drains_once_and_stays_small() -> None:
    """Broken: a lane that cannot report for an hour keeps every origin of the hour as bytes, or tells everything twice."""
    subject = Accumulator("expel", "small")
    for first in range(0, 100_000, 1000):
        subject.add("delivered", [make_record(b"a:0:%d" % number) for number in range(first, first + 1000)])
        waiting = subject._waiting.get(("delivered", None), [])
        assert sum(text.count(b",") + 1 for text in waiting) <= accumulator._FOLD_AT
    packed = subject.drain().pack()
    assert [len(unpack_numbers(one.numbers)) for one in packed] == [100_000]
    assert sum(len(one.numbers) for one in packed) < 100
    assert not subject.drain()


def test_numbers_too_large_behind_small_ones() -> None:
    """Broken: what others wrote overflows the sets, or is taken for an event of ours."""
    subject = Accumulator("expel", "large")
    for largest in (MAX_NUMBER, 1 << 32, 9_999_999_999):
        subject.add("delivered", [make_record(b"a:0:%d" % number) for number in (7, largest)])
        subject.add("dead", [make_record(b"a:0:%d" % number) for number in (MAX_NUMBER - 1, largest)])
    found = unpack(subject.drain())
    assert found == {("delivered", "a", 0): {7}, ("dead", "a", 0): {MAX_NUMBER - 1}}
