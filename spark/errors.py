"""Spark's errors in an operator's words: one line, without plans and stacks."""

import re
from typing import Any

MESSAGE_CHARACTERS = 300
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
