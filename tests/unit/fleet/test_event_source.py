"""Reading events from files and pipes: every payload byte for byte, every format, in bounded memory."""

import gzip
import io
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.fleet.sending import event_source
from services.fleet.sending.event_source import BadInput, SourceEvent, read_events

TRICKY = [
    b'{"id":"1","n":12345678901234567890123,"f":1.10}',
    b'{ "s" : "line\\nquote\\"brace}]," }',
    '{"ü":"€ 😀"}'.encode(),
    b"{}",
]


class Dripping(io.RawIOBase):
    """A pipe that gives a few bytes at a time."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data, self._size = io.BytesIO(data), size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._data.read(min(self._size, len(buffer)))
        buffer[: len(data)] = data
        return len(data)


def read(data: bytes, size: int = 1 << 30) -> list[SourceEvent]:
    with io.BufferedReader(Dripping(data, size)) as source:
        return list(read_events(source))


def payloads(data: bytes, size: int = 1 << 30) -> list[bytes]:
    return [event.payload for event in read(data, size)]


@pytest.mark.parametrize("size", [2, 3, 1 << 30])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_every_format_keeps_the_bytes(size: int, pack: type[bytes]) -> None:
    """Broken: a number loses digits, a string its escapes, or a format is not understood."""
    array = b" [ " + b" ,\n ".join(TRICKY) + b" ]\n"
    pretty = json.dumps(json.loads(TRICKY[1]), indent=2).encode()
    assert payloads(pack(array), size) == TRICKY
    assert payloads(pack(b"\n".join(TRICKY)), size) == TRICKY
    assert payloads(pack(b"\r\n".join(TRICKY) + b"\r\n\r\n"), size) == TRICKY
    assert payloads(pack(b"\xef\xbb\xbf" + TRICKY[0]), size) == TRICKY[:1]
    assert [json.loads(one) for one in payloads(pack(pretty), size)] == [json.loads(TRICKY[1])]


@given(
    st.lists(st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=9)), max_size=3)),
    st.integers(1, 40),
)
def test_any_events_in_any_pieces(events: list[dict[str, object]], size: int) -> None:
    """Broken: an event that lies across two reads is cut or lost."""
    texts = [json.dumps(one, ensure_ascii=False).encode() for one in events]
    assert payloads(b"[" + b",".join(texts) + b"]", size) == texts
    assert payloads(b"\n".join(texts) + b"\n", size) == texts


def test_a_bad_line_is_that_lines_fault() -> None:
    """Broken: one bad line of a million keeps the others from being sent, or is named by the wrong number."""
    found = read(b'{"a":1}\n\n{"a":\n[1]\n{"a":"\xff"}\n{"a":2}')
    assert [(event.position, event.fault) for event in found] == [
        (1, ""),
        (3, "not valid JSON: Input data was truncated"),
        (4, "not a JSON object"),
        (5, "not UTF-8"),
        (6, ""),
    ]


@pytest.mark.parametrize("size", [20, 1 << 30])
@pytest.mark.parametrize(
    "bad", [b"starting", b"[INFO] starting", b'{"a":', b'{"a":1,', b"{'a': 1}", b"\xff", b"a\nb", b'{"a":"\xff"}']
)
def test_bad_lines_at_the_beginning(bad: bytes, size: int) -> None:
    """Broken: one bad first line keeps all the others from being sent, while a later one would not."""
    found = read(bad + b'\n{"a":1}\n{"a":2}', size)
    count = 1 + bad.count(b"\n")
    assert [event.position for event in found if event.fault] == list(range(1, count + 1))
    assert [(event.position, event.payload, event.unit) for event in found if not event.fault] == [
        (count + 1, b'{"a":1}', "line"),
        (count + 2, b'{"a":2}', "line"),
    ]


@pytest.mark.parametrize("indent", [0, 1])
@pytest.mark.parametrize("size", [1, 7, 1 << 30])
def test_one_value_on_several_lines_is_not_taken_for_lines(indent: int, size: int) -> None:
    """Broken: an object inside of a larger one is sent as an event, because a line begins and ends with it."""
    value = {"a": [{}, {"b": [{"c": "x\\", "d": -1.5e3}], "e": None}], "f": {"g": {}}, "h": [[], [{"i": True}]]}
    text = json.dumps(value, indent=indent).replace("[\n{\n", "[\n{").encode() + b"\n"
    assert [json.loads(one) for one in payloads(text * 2, size)] == [value, value]


@pytest.mark.parametrize("data", [b"", b"\n \n", b"[]", b" [ ] ", gzip.compress(b"", mtime=0)])
def test_nothing(data: bytes) -> None:
    """Broken: an empty file is an error, or an event."""
    assert read(data) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'[{"a":1} {"b":2}]', "after event 1: not a valid JSON array"),
        (b'[{"a":1},]', "event 2, line 1: not valid JSON"),
        (b'\n[{"a":1},\n{"b":\n]', "event 2, line 4: not valid JSON"),
        (b'[\n{"a":1}\n{"b":2}\n]\n', "after event 1: not a valid JSON array"),
        (b'[{"a":1}', "after event 1: not a valid JSON array"),
        (b'[{"a":1}] x', "more text after the end"),
        (b'[\n{"a":1},\n{"b":2},\n{"c": d-4},\n{"e":5}\n]\n', "event 3, line 4: not valid JSON"),
        (b"hello\nworld\n", "event 1, line 1: not valid JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'["\xff"]', "line 1 is not UTF-8 text"),
        (b'[\n{"a":1},\n{"b":"\xff"}]', "line 3 is not UTF-8 text"),
        (gzip.compress(b"x" * 9999, mtime=0)[:-9], "gzip data is damaged or incomplete"),
    ],
)
def test_what_cannot_be_read(data: bytes, message: str) -> None:
    """Broken: a damaged file is sent in part as if it were whole."""
    with pytest.raises(BadInput, match=message):
        read(data)


def read_until_damage(data: bytes, size: int) -> tuple[list[bytes], str]:
    """(the good events, the damage)."""
    found: list[bytes] = []
    with io.BufferedReader(Dripping(data, size)) as source:
        try:
            found.extend(event.payload for event in read_events(source) if not event.fault)
        except BadInput as error:
            return found, str(error)
    return found, ""


@given(
    st.sampled_from(["array", "lines", "values"]),
    st.sampled_from(["cut", "\xff"]),
    st.integers(2, 60),
    st.floats(0, 1),
    st.sampled_from([7, 1 << 30]),
)
def test_the_events_before_damage_are_read(form: str, damage: str, count: int, place: float, size: int) -> None:
    """Broken: the command says that the events before the damage were sent, and some were not even read."""
    begin, between, end = {"array": (b"[", b",\n", b"]"), "lines": (b"", b"\n", b"\n"), "values": (b"", b" ", b"")}[
        form
    ]
    events = [b'{"n":%d,"s":"\xc3\xbc"}' % number for number in range(count)]
    text = begin + between.join(events) + end
    at = len(begin) + round(place * (len(text) - len(begin) - 1))
    cut = text[:at] if damage == "cut" else text[:at] + b"\xff" + text[at + 1 :]
    last = at - 1 if form == "lines" and damage != "cut" else at  # a line ends with its own end
    whole = sum(1 for number in range(count) if len(begin + between.join(events[: number + 1])) <= last)
    found, said = read_until_damage(cut, size)
    assert found[:whole] == events[:whole]
    assert said or form != "array"
    packed, said = read_until_damage(gzip.compress(text, mtime=0)[:-5], size)
    assert (packed, said[:4]) == (events, "the ")


def test_a_line_before_an_endless_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a line without end takes the good lines of its chunk with it."""
    monkeypatch.setattr(event_source, "MAX_EVENT_BYTES", 100_000)
    found, said = read_until_damage(b'{"a":1}\n{"b":"' + b"x" * 2_000_000, 1 << 30)
    assert (found, said) == ([b'{"a":1}'], "line 2 is larger than 100000 bytes")


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a file that is no JSON fills the memory."""
    monkeypatch.setattr(event_source, "MAX_EVENT_BYTES", 100_000)
    for data in (b'[{"a":"' + b"x" * 2_000_000, b'{"a":1}\n{"b":"' + b"x" * 2_000_000):
        with pytest.raises(BadInput, match="larger than"):
            read(data)


@pytest.mark.parametrize("array", [True, False])
def test_memory_is_bounded(array: bool) -> None:
    """Broken: a file of a hundred gigabytes needs as much memory."""
    one = b'{"a":"' + b"x" * 500 + b'"}'
    data = b"[" + b",".join([one] * 20_000) + b"]" if array else b"\n".join([one] * 20_000)
    with io.BufferedReader(Dripping(data, 1 << 16)) as source:
        tracemalloc.start()
        try:
            assert len([event.position for event in read_events(source)]) == 20_000
            assert tracemalloc.get_traced_memory()[1] < 4_000_000
        finally:
            tracemalloc.stop()
