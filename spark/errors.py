"""Spark's errors in an operator's words: one line, without plans and stacks."""

import re
from collections.abc import Iterator
from typing import Any

from py4j.protocol import Py4JError, Py4JNetworkError  # type: ignore[import-untyped]

from services.core.broker.errors import BrokerError

MESSAGE_CHARACTERS = 300
_MOST_CAUSES = 10
_NOISE = re.compile(r"\[SQLSTATE: \w+\]|SQLSTATE: \w+;?|\s*== SQL.*", re.DOTALL)
_TRACEBACK = "Traceback (most recent call last)"


def shorten(error: BaseException) -> str:
    """What the error says, at most MESSAGE_CHARACTERS long."""
    text = _of_java(error) or str(error).split("\nJVM stacktrace")[0]
    if _TRACEBACK in text:
        return _cut(_raised_by_python(text.split(_TRACEBACK, 1)[1]))
    kept: list[str] = []
    for line in text.splitlines():
        if kept and line.startswith(("'", "+-", "   ", "== ", "\tat ", "Driver stacktrace")):
            break
        kept.append(line.strip())
    return _cut(_NOISE.sub("", " ".join(filter(None, kept))).strip(" ;"))


_BROKER_CLASSES = ("org.apache.kafka.", "org.apache.spark.sql.kafka010.")
_BROKER_WORDS = (
    "services.core.broker.errors.",
    "spark.sources.",
    "[KAFKA_",
    "PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR",
)
"""What a failure of the broker's has in its text: our errors' module in a worker's traceback, and Spark's conditions."""


def is_of_broker(error: BaseException) -> bool:
    """Whether the failure came from reading or writing, not from what was computed with the data."""
    if isinstance(error, BrokerError):
        return True
    if any(word in str(error) for word in _BROKER_WORDS):
        return True
    return any(kind.startswith(_BROKER_CLASSES) for kind in _java_classes(error))


def is_answer(error: BaseException) -> bool:
    """Whether Java, or our own code, says so: it runs still. Else nobody knows."""
    return not isinstance(error, OSError | EOFError | Py4JNetworkError)


def _java_classes(error: BaseException) -> Iterator[str]:
    """Of a Java exception and its causes, outermost first."""
    return (str(cause.getClass().getName()) for cause in _java_chain(error))


def _java_chain(error: BaseException) -> Iterator[Any]:
    cause: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    for _ in range(_MOST_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.getCause()


def java_causes(error: BaseException) -> list[str]:
    """Each Java exception behind the error, outermost first, in a few words: some have a class that says all, and no message."""
    try:
        return [
            _cut(f"{cause.getClass().getName()}: {cause.getMessage()}".split("\n")[0]) for cause in _java_chain(error)
        ]
    except (Py4JError, OSError):
        return []  # Java is gone


def _of_java(error: BaseException) -> str | None:
    """The innermost message of a Java exception that came through py4j as it is; the outer ones say that a task failed."""
    cause: Any = getattr(error, "java_exception", None)
    text = None
    while cause is not None:
        message = cause.getMessage()
        text = f"{cause.getClass().getSimpleName()}: {message}" if message else text
        cause = cause.getCause()
    return text


def _raised_by_python(traceback: str) -> str:
    """The last line of a traceback: it is not indented, the stack above it is."""
    for line in traceback.splitlines()[1:]:
        if line and not line[0].isspace():
            return line
    return traceback.strip()


def _cut(line: str) -> str:
    return line if len(line) <= MESSAGE_CHARACTERS else line[: MESSAGE_CHARACTERS - 1] + "…"
