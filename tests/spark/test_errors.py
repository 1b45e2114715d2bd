"""Spark's errors in an operator's words."""

from types import SimpleNamespace
from typing import Any

from spark.brokers.contract import is_too_much
from spark.errors import is_of_spark, java_causes
from spark.java import is_answer


class Cause:
    """A Java exception, as py4j hands it out."""

    def __init__(self, name: str, message: str | None, cause: "Cause | None" = None) -> None:
        self.name, self.message, self.cause = name, message, cause

    def getClass(self) -> Any:  # noqa: N802 - Java's name
        return SimpleNamespace(getName=lambda: self.name)

    def getMessage(self) -> str | None:  # noqa: N802 - Java's name
        return self.message

    def getCause(self) -> "Cause | None":  # noqa: N802 - Java's name
        return self.cause


class Failed(RuntimeError):
    java_exception: Any = None


def test_every_java_cause_is_named() -> None:
    """If this fails, the log does not say what is wrong with a Spark that fails a pipe again and again."""
    error = Failed("failed")
    inner = Cause("java.io.OptionalDataException", None)
    error.java_exception = Cause("org.apache.spark.SparkException", "Store broadcast 7 failed\n\tat x", inner)
    assert java_causes(error) == [
        "org.apache.spark.SparkException: Store broadcast 7 failed",
        "java.io.OptionalDataException: None",
    ]
    inner.cause = error.java_exception
    assert len(java_causes(error)) == 10, "causes in a circle"
    assert java_causes(RuntimeError("ours")) == []


def test_a_java_that_is_gone_answers_nothing() -> None:
    """If this fails, the end of Java counts as a failure of the transform, and healthy events are to blame."""
    assert not is_answer(ConnectionRefusedError(111, "Connection refused"))
    assert not is_answer(EOFError())
    assert is_answer(RuntimeError("it fails on this event"))


def test_what_is_too_much() -> None:
    """If this fails, a batch that is only too large stops its pipe as a broken transform would."""
    assert is_too_much(
        RuntimeError("Total size of serialized results of 2 tasks is bigger than spark.driver.maxResultSize")
    )
    assert is_too_much(RuntimeError("[USER_RAISED_EXCEPTION] more than 500000 rows come out of one task"))
    assert not is_too_much(RuntimeError("[DIVIDE_BY_ZERO]"))


def test_a_failure_of_spark_is_no_fault_of_an_event() -> None:
    """If this fails, events are tried alone while Spark goes away or starts no Python in time, and innocent ones are culprits."""
    assert is_of_spark(RuntimeError("[CANNOT_OPEN_SOCKET] Can not open socket: timed out."))
    assert is_of_spark(RuntimeError("Python worker failed to connect back."))
    assert is_of_spark(RuntimeError("Job 7 cancelled because SparkContext was shut down"))
    assert is_of_spark(RuntimeError("Cannot call methods on a stopped SparkContext."))
    raised = "pyspark.errors.exceptions.base.PySparkRuntimeError: [CANNOT_OPEN_SOCKET] x"
    worker = f"Traceback (most recent call last):\n  File x\n{raised}"
    assert is_of_spark(RuntimeError(worker))
    assert not is_of_spark(RuntimeError("Job aborted due to stage failure: ExecutorLostFailure (executor 1 exited)"))
    of_event = "The value 'Python worker failed to connect back.' of the type STRING cannot be cast"
    assert not is_of_spark(RuntimeError(f"[CAST_INVALID_INPUT] {of_event}"))
    assert not is_of_spark(
        RuntimeError("Traceback (most recent call last):\n  File x\nValueError: [CANNOT_OPEN_SOCKET]")
    )
