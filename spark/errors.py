"""Spark's errors in an operator's words: one line, without plans and stacks."""

import re
from contextlib import suppress

from services.core.broker.errors import BrokerError
from spark.java import JAVA_ERRORS, java_exceptions

MESSAGE_CHARACTERS = 300
_NOISE = re.compile(r"\[SQLSTATE: \w+\]|SQLSTATE: \w+;?|\s*== SQL.*", re.DOTALL)
_TRACEBACK = "Traceback (most recent call last)"
_BROKER_CLASSES = ("org.apache.kafka.", "org.apache.spark.sql.kafka010.")
_BROKER_WORDS = (
    "services.core.broker.errors.",
    "spark.sources.",
    "[KAFKA_",
    "PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR",
)
"""These are in the text of a broker's failure: our modules in a worker's traceback, and Spark's error conditions."""


_OF_SPARK = re.compile(
    r"(?:[\w.]*(?:SparkException|PySparkRuntimeError): )?"
    r"(?:Job \d+ cancelled because SparkContext was shut down|Cannot call methods on a stopped SparkContext"
    r"|SparkContext has been shutdown|\[CANNOT_OPEN_SOCKET\]|Python worker failed to connect back"
    r"|Timed out while waiting for the Python worker to connect back)"
)
"""So begins the message of a failure that would be the same with other events: at the end of the application, or where a busy
machine did not start Python in time. Only the beginning counts: what follows in other errors may be an event's own text."""


def shorten(error: BaseException) -> str:
    """The error's message, at most MESSAGE_CHARACTERS long."""
    text = _java_message(error) or str(error).split("\nJVM stacktrace")[0]
    if _TRACEBACK in text:
        return _cut(_python_error(text.split(_TRACEBACK, 1)[1]))
    kept: list[str] = []
    for line in text.splitlines():
        if kept and line.startswith(("'", "+-", "   ", "== ", "\tat ", "Driver stacktrace")):
            break
        kept.append(line.strip())
    return _cut(_NOISE.sub("", " ".join(filter(None, kept))).strip(" ;"))


def is_of_broker(error: BaseException) -> bool:
    """Whether the failure came from reading or writing, not from the computation."""
    if isinstance(error, BrokerError) or any(word in str(error) for word in _BROKER_WORDS):
        return True
    return any(str(cause.getClass().getName()).startswith(_BROKER_CLASSES) for cause in java_exceptions(error))


def is_of_spark(error: BaseException) -> bool:
    """Whether Spark itself failed, or has ended the application meanwhile: this says nothing about an event."""
    texts = [str(error)]
    with suppress(*JAVA_ERRORS, OSError):  # Java is gone
        texts += [str(cause.getMessage()) for cause in java_exceptions(error)]
    texts += [_python_error(text.split(_TRACEBACK, 1)[1]) for text in texts if _TRACEBACK in text]
    return any(_OF_SPARK.match(text) for text in texts)


def java_causes(error: BaseException) -> list[str]:
    """Class and message of each Java exception behind the error, outermost first. Some have no message."""
    try:
        return [
            _cut(f"{cause.getClass().getName()}: {cause.getMessage()}".split("\n")[0])
            for cause in java_exceptions(error)
        ]
    except (*JAVA_ERRORS, OSError):
        return []  # Java is gone


def _java_message(error: BaseException) -> str | None:
    """The innermost message of an exception that py4j raised unchanged; the outer ones only say that a task failed."""
    if getattr(error, "java_exception", None) is None:
        return None
    texts = [(c.getClass().getSimpleName(), c.getMessage()) for c in java_exceptions(error)]
    return next((f"{name}: {message}" for name, message in reversed(texts) if message), None)


def _python_error(traceback: str) -> str:
    """The last line of a traceback: the first that is not indented."""
    lines = traceback.splitlines()[1:]
    return next((line for line in lines if line and not line[0].isspace()), traceback.strip())


def _cut(line: str) -> str:
    return line if len(line) <= MESSAGE_CHARACTERS else line[: MESSAGE_CHARACTERS - 1] + "…"
