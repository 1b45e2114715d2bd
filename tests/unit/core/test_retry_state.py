"""The state of a waiting event travels in headers: what was wrapped comes out exactly, what is not right is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.broker.record import Record, TopicPartition
from services.core.undelivered.retry_state import (
    MAX_DETAIL,
    PREFIX,
    BadRetryRecord,
    RetryState,
    read_state,
    read_wait,
    unwrap,
    wrap,
)

NOW = 1_800_000_000_000
STATE = RetryState("late", "ops", 4, 1, NOW - 5, NOW + 5, "http_503", "away", "flights:2:17", NOW - 9)
RECORD = Record(b"k", b"{}", STATE.time, (("ce_id", b"1"), ("penstock_origin", b"a:0:0")))

names = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,62}", fullmatch=True)
millis = st.integers(-(10**14), 10**15 - 1)
counts = st.integers(0, 10**9 - 1)
texts = st.text(st.characters(codec="utf-8"), max_size=25)
sources = st.builds(
    "{}:{}:{}".format, st.sampled_from(["flights", "late.out", "a-b_c"]), counts, st.integers(0, 2**200)
)
states = st.builds(
    RetryState, names, names, counts, counts, millis, millis, reason=texts, detail=texts, source=sources, time=millis
)
own_headers = st.lists(
    st.tuples(st.text(max_size=20).filter(lambda name: not name.startswith(PREFIX)), st.binary(max_size=50)), max_size=8
)
payloads = st.none() | st.binary(max_size=100)


@given(key=payloads, value=payloads, headers=own_headers, state=states, earlier=st.none() | states, now=millis)
def test_what_was_wrapped_comes_out(
    key: bytes | None,
    value: bytes | None,
    headers: list[tuple[str, bytes]],
    state: RetryState,
    earlier: RetryState | None,
    now: int,
) -> None:
    """Broken: a receiver gets another event than the one that failed, or the count of attempts starts again."""
    record = Record(key, value, state.time, tuple(headers))
    given_over = record if earlier is None else wrap(record, earlier, 1)
    wrapped = wrap(given_over, state, now)
    assert wrapped.timestamp == now
    assert unwrap(wrapped) == (record, state)
    assert read_wait(wrapped) == (state.pipe, state.destination, state.due)


@given(
    name=st.sampled_from([name for name, _ in wrap(RECORD, STATE, NOW).headers[:10]]), value=st.binary(max_size=1200)
)
def test_anything_in_a_header_is_read_or_refused(name: str, value: bytes) -> None:
    """Broken: a record that somebody else wrote ends the retrier, or names a topic outside of the pipe's own."""
    headers = tuple((found, value if found == name else old) for found, old in wrap(RECORD, STATE, NOW).headers)
    record = Record(None, b"", NOW, headers)
    try:
        state = read_state(record)
    except BadRetryRecord as error:
        refused = error.header
        with pytest.raises(BadRetryRecord):
            read_wait(record)
    else:
        refused = name
        assert read_wait(record) == (state.pipe, state.destination, state.due)
        assert state.pipe.replace("-", "").replace("_", "").isalnum()
        assert len(state.detail) <= MAX_DETAIL
    assert refused == name


@pytest.mark.parametrize("name", [name for name, _ in wrap(RECORD, STATE, NOW).headers[:10]])
def test_a_missing_header_is_named(name: str) -> None:
    """Broken: a half retry record is taken for a whole one, or nobody learns what it lacks."""
    headers = tuple(header for header in wrap(RECORD, STATE, NOW).headers if header[0] != name)
    with pytest.raises(BadRetryRecord, match=f"header {name} is missing"):
        unwrap(Record(None, b"", NOW, headers))
    with pytest.raises(BadRetryRecord, match=f"header {name} is missing"):
        read_wait(Record(None, b"", NOW, headers))


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("pipe", b"../x"),
        ("pipe", b""),
        ("pipe", b"a\n"),
        ("destination", b"Ops"),
        ("attempts", b"-1"),
        ("attempts", b"1" * 10),
        ("rounds", "\u0661".encode()),
        ("due", b"1e9"),
        ("due", b"9" * 16),
        ("source", b"flights:2"),
        ("source", b"a/b:0:0"),
        ("reason", b"x" * 101),
        ("detail", b"x" * 1025),
        ("detail", b"\xff"),
    ],
)
def test_a_wrong_header_is_named(header: str, value: bytes) -> None:
    """Broken: a forged state is acted on."""
    wrapped = wrap(RECORD, STATE, NOW)
    headers = tuple((name, value if name == PREFIX + header else old) for name, old in wrapped.headers)
    for read in (read_state, read_wait):
        with pytest.raises(BadRetryRecord) as caught:
            read(Record(None, b"", NOW, headers))
        assert caught.value.header == PREFIX + header


def test_long_texts_are_cut_between_characters() -> None:
    """Broken: a receiver's long answer makes the event too large, or its headers unreadable."""
    state = RetryState(**{**{name: getattr(STATE, name) for name in STATE.__slots__}, "detail": "\u20ac" * 2000})
    _, found = unwrap(wrap(RECORD, state, NOW))
    assert found.detail == "\u20ac" * (MAX_DETAIL // 3)


def test_the_original_position() -> None:
    """Broken: a dead letter says that its event lies elsewhere."""
    assert STATE.position() == (TopicPartition("flights", 2), 17)
