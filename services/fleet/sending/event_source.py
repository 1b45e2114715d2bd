"""Reads events from a file or pipe in bounded memory: a JSON array, NDJSON or consecutive JSON values, each also gzipped.

Everything blocks; the sender calls it from a thread. Payloads keep their bytes: they are cut out, not parsed and written again.
"""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import json
import os
import re
import select
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from typing_extensions import Buffer

STDIN = 0


class InputFile(io.FileIO):
    """The raw bytes of a file or of standard input. Standard input is not closed. Raises OSError when it cannot be opened."""

    def __init__(self, file: Path | int) -> None:
        super().__init__(file, closefd=not isinstance(file, int))
        self._stopped, self._stop = os.pipe()
        os.set_blocking(self._stop, False)

    def readinto(self, buffer: Buffer, /) -> int | None:
        """Blocks until there are bytes, the file ends (0), or `stop` is called. After `stop` it returns 0."""
        ready, _, _ = select.select([self.fileno(), self._stopped], [], [])
        return 0 if self._stopped in ready else super().readinto(buffer)

    def stop(self) -> None:
        """End the current read and all later ones."""
        os.write(self._stop, b".")

    def close(self) -> None:
        """Close it; a second call does nothing."""
        if not self.closed:
            os.close(self._stopped)
            os.close(self._stop)
        super().close()


CHUNK = 256 << 10
MAX_EVENT_BYTES = 8 << 20
"""More than any ingest accepts. A larger value means a broken file."""
_WHITESPACE = " \t\r\n"


class SourceEvent(NamedTuple):
    """One event of the input. position: its line (NDJSON) or its number, from 1. fault: why it cannot be sent, or ''.

    unit: the word for the position, "line" or "event".
    """

    position: int
    payload: bytes
    fault: str
    unit: str = "event"


_PLACE = re.compile(r" at line \d+, column \d+")


def without_place(detail: str) -> str:
    """Ingest's words about one event, without the place in the request. A person looks for the place in the input."""
    return _PLACE.sub("", detail)


class Readable(Protocol):
    """A file, a pipe, or a decompressor of one."""

    def read1(self, size: int, /) -> bytes:
        """At most `size` bytes, as soon as there are any; b"" at the end. Blocks."""


class BadInput(Exception):
    """The rest of the input cannot be read; the events before it are good. The message is for a person."""


class _Head(msgspec.Struct):
    """Decodes only a JSON object; no field is read."""


_OBJECT = msgspec.json.Decoder(_Head)


def read_events(source: io.BufferedReader[Any]) -> Iterator[SourceEvent]:
    """Yield the events in order, as soon as the input has them, also all that end before damage. Raises BadInput, OSError."""
    packed = source.peek(2)[:2] == b"\x1f\x8b"
    unpacked = _Gzip(source) if packed else None
    readable: Readable = source if unpacked is None else unpacked
    try:
        yield from _read_text(_first_chunk(readable), readable)
    except RecursionError as error:
        raise BadInput("the JSON is nested too deeply") from error
    except BadInput:
        if unpacked is None or unpacked.damage is None:
            raise
    if unpacked is not None and unpacked.damage is not None:
        raise BadInput(f"the gzip data is damaged or incomplete: {unpacked.damage}") from unpacked.damage


class _Gzip:
    """A decompressor. Damage ends the text, so that the events before it are read. damage: the error."""

    def __init__(self, source: io.BufferedReader[Any]) -> None:
        self._file = gzip.GzipFile(fileobj=source)
        self.damage: Exception | None = None

    def read1(self, size: int, /) -> bytes:
        if self.damage is None:
            try:
                return self._file.read1(size)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                self.damage = error
        return b""


def _first_chunk(source: Readable) -> bytes:
    """The beginning without a byte order mark, long enough to detect the format; b"" when there is only white space."""
    first = b""
    while chunk := source.read1(CHUNK):
        first += chunk
        if len(first.lstrip()) >= len(codecs.BOM_UTF8):
            break
        first = first[-CHUNK:]
    return first.removeprefix(codecs.BOM_UTF8) if first.strip() else b""


def _read_text(first: bytes, source: Readable) -> Iterator[SourceEvent]:
    """Detect the format, and read. Bad lines before the first object of NDJSON do not change the format."""
    text = first.lstrip()
    closing = "]" if text.startswith(b"[") else ""
    line, newline, _ = text.partition(b"\n")
    if newline and not _fault(
        line.strip().decode(errors="replace").encode()
    ):  # a line that is not UTF-8 is its own fault
        return _read_lines(first, source)
    if closing and not _is_broken(line + newline):
        return _read_values(first, source, closing=closing)
    ended = False
    while len(first) < CHUNK and (broken := _is_broken(first)) is not None:
        if broken and _has_object_line(first):
            return _read_lines(first, source)
        if ended:
            break
        chunk = source.read1(CHUNK)
        ended = not chunk
        first += chunk or b"\n"
    return _read_values(first, source, closing=closing)


def _is_broken(text: bytes) -> bool | None:
    """Whether a whole line damages the first value, so that no later line can complete it. None: the value is complete."""
    scan = json.JSONDecoder().raw_decode
    try:
        scan(text.decode(errors="replace").lstrip())
    except json.JSONDecodeError:
        lines = text[: text.rfind(b"\n") + 1].decode(errors="replace").strip()
        try:
            scan(lines)
        except json.JSONDecodeError as error:
            return error.pos < len(lines)
    return None


def _has_object_line(text: bytes) -> bool:
    """Whether a whole line after the first one is a JSON object."""
    return any(line.startswith(b"{") and not _fault(line) for line in text.lstrip().split(b"\n")[1:-1])


def _read_lines(first: bytes, source: Readable) -> Iterator[SourceEvent]:
    """Read NDJSON. A bad line does not affect the others."""
    rest, number = b"", itertools.count(1)
    for chunk in itertools.chain([first], iter(lambda: source.read1(CHUNK), b"")):
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        for line in lines:
            position = next(number)
            if text := line.strip():
                yield SourceEvent(position, text, _fault(text), "line")
        if len(rest) > MAX_EVENT_BYTES:
            raise BadInput(f"line {next(number)} is larger than {MAX_EVENT_BYTES} bytes")
    if text := rest.strip():
        yield SourceEvent(next(number), text, _fault(text), "line")


def _fault(payload: bytes) -> str:
    """Why this text is no event. Checks the syntax only; ingest checks the rest."""
    try:
        payload.decode()
        _OBJECT.decode(payload)
    except UnicodeDecodeError:
        return "not UTF-8"
    except msgspec.ValidationError:
        return "not a JSON object"
    except msgspec.DecodeError as error:
        return f"not valid JSON: {str(error).removeprefix('JSON is malformed: ')}"
    return ""


def _read_values(first: bytes, source: Readable, *, closing: str) -> Iterator[SourceEvent]:
    """Read consecutive JSON values: the items of an array (`closing` is "]"), or values separated by white space.

    The standard library's scanner finds the end of each value. The text of the value is passed on unchanged.
    """
    text = _Text(first, source)
    if closing and text.next_mark():
        text.advance(1)
    scan = json.JSONDecoder().raw_decode
    for position in itertools.count(1):
        mark = text.next_mark()
        if mark == closing:
            if closing:
                text.advance(1)
            break
        if closing and position > 1:
            if mark != ",":
                raise BadInput(f"after event {position - 1}: not a valid JSON array")
            text.advance(1)
            text.next_mark()
        start, end = text.find_value(scan, position)
        payload = text.buffer[start:end].encode()
        text.advance(end - start)
        yield SourceEvent(position, payload, _fault(payload))
    if text.next_mark():
        raise BadInput("there is more text after the end of the JSON array")


class _Text:
    """A window of decoded text over the input. `at`: the index of the next character in `buffer`."""

    def __init__(self, first: bytes, source: Readable) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._source = source
        self._fault: UnicodeDecodeError | None = None
        self.buffer, self.at, self.ended = "", 0, False
        self._lines = 1
        self._append(first)

    def advance(self, count: int) -> None:
        self.at += count

    def next_mark(self) -> str:
        """Skip white space. Returns the next character, or "" at the end."""
        while True:
            while self.at < len(self.buffer) and self.buffer[self.at] in _WHITESPACE:
                self.at += 1
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if not self._more():
                self._check()
                return ""

    def find_value(self, scan: Callable[[str, int], tuple[Any, int]], position: int) -> tuple[int, int]:
        """(start, end) in `buffer` of the value that begins at `at`."""
        while True:
            try:
                _value, end = scan(self.buffer, self.at)
            except json.JSONDecodeError as error:
                if len(self.buffer) - self.at > MAX_EVENT_BYTES:
                    raise BadInput(f"event {position} is larger than {MAX_EVENT_BYTES} bytes, or broken") from error
                place = error.pos - self.at  # `_more` drops the text before `at`
                if not self._more():
                    self._check()
                    line = self._lines + self.buffer.count("\n", 0, self.at + place)
                    raise BadInput(f"event {position}, line {line}: not valid JSON: {error.msg}") from error
                continue
            if end < len(self.buffer) or not self._more():  # a number may continue in the next chunk
                return self.at, end

    def _more(self) -> bool:
        """Read one more chunk; False when there is no more text."""
        if self.ended:
            return False
        chunk = self._source.read1(CHUNK)
        self.ended = not chunk
        self._lines += self.buffer.count("\n", 0, self.at)
        self.buffer, self.at = self.buffer[self.at :], 0
        before = len(self.buffer)
        self._append(chunk)
        return not self.ended or len(self.buffer) > before

    def _append(self, chunk: bytes) -> None:
        """Add the text of the chunk, at most up to the first bytes that are none."""
        try:
            self.buffer += self._decoder.decode(chunk, final=self.ended)
        except UnicodeDecodeError as error:
            self.buffer += error.object[: error.start].decode()
            self._fault, self.ended = error, True

    def _check(self) -> None:
        if self._fault is not None:
            line = self._lines + self.buffer.count("\n")
            raise BadInput(f"line {line} is not UTF-8 text") from self._fault
