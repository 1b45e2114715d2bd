"""A stream is deleted by its incarnation, however slow the service is, and never for another one of its name."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError, ReadTimeoutError

from services.core.broker.errors import Unavailable, UnknownTopic
from services.core.broker.kinesis import deletion
from services.core.broker.kinesis.aws import Timing
from services.core.broker.kinesis.deletion import delete_stream
from services.core.broker.kinesis.incarnation import Incarnations

_FIRST, _SECOND = "1:t:1700000000", "1:t:1700000001"


class _Account:
    """With one stream. takes: how long each description takes in turn; the last one's time stays. deleted: when each stream was
    made that DeleteStream took."""

    def __init__(self, *takes: float) -> None:
        self.now, self.takes, self.made, self.status = 0.0, list(takes), 1_700_000_000, "ACTIVE"
        self.deleted: list[int] = []
        self.loses_answers = False
        self.meanwhile: Callable[[], None] = lambda: None
        """Called behind the first answer to a description, before it arrives."""

    async def describe_stream_summary(self, **_asked: Any) -> dict[str, Any]:
        if self.status == "gone":
            raise _refusal("ResourceNotFoundException")
        summary = {
            "StreamARN": "arn:aws:kinesis:eu-west-1:1:stream/t",
            "StreamName": "t",
            "StreamCreationTimestamp": datetime.fromtimestamp(self.made, UTC),
            "RetentionPeriodHours": 24,
            "StreamStatus": self.status,
        }
        self.now += self.takes.pop(0) if len(self.takes) > 1 else self.takes[0]
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return {"StreamDescriptionSummary": summary}

    async def delete_stream(self, **_asked: Any) -> None:
        if self.status != "ACTIVE":
            raise _refusal("ResourceInUseException")
        self.deleted.append(self.made)
        self.status = "DELETING" if self.loses_answers else "gone"
        if self.loses_answers:
            raise ReadTimeoutError(endpoint_url="https://kinesis.example")

    def create_again(self) -> None:
        self.made, self.status = 1_700_000_001, "ACTIVE"


def _refusal(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": ""}}, "of a test")


async def _delete(account: _Account, monkeypatch: pytest.MonkeyPatch, incarnation: str = _FIRST) -> None:
    monkeypatch.setattr(deletion, "boot_seconds", lambda: account.now)
    timing = Timing()
    await delete_stream(account, Incarnations(account, timing), "t", incarnation, timing)


async def test_a_slow_day_ends_no_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a migration can be neither finished nor undone where a description always takes a little longer."""
    for takes in ((0.01,), (2.5,), (6.5,), (2.5, 4.0)):
        account = _Account(*takes)
        await _delete(account, monkeypatch)
        assert account.deleted == [1_700_000_000], takes


async def test_whoever_was_frozen_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a command that wakes up after hours deletes the stream that has the name by now."""
    account = _Account(10_000.0, 0.01)
    account.meanwhile = account.create_again
    with pytest.raises(UnknownTopic, match="created again"):
        await _delete(account, monkeypatch)
    assert account.deleted == []
    for takes in ((8.0,), (2.5, 5.5, 7.5)):  # longer than a request may take, or each time for longer
        account = _Account(*takes)
        with pytest.raises(Unavailable, match=r"was not deleted: it took .* Try: the same again"):
            await _delete(account, monkeypatch)
        assert account.deleted == []


async def test_a_lost_answer_deletes_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the command is repeated, as nobody knows the outcome, and deletes what somebody has created since."""
    account = _Account(0.01)
    account.loses_answers = True
    with pytest.raises(Unavailable):
        await _delete(account, monkeypatch)
    with pytest.raises(Unavailable, match="ResourceInUse"):  # it is being deleted
        await _delete(account, monkeypatch)
    account.status = "gone"
    with pytest.raises(UnknownTopic):
        await _delete(account, monkeypatch)
    account.create_again()
    with pytest.raises(UnknownTopic, match="created again"):
        await _delete(account, monkeypatch)
    assert account.deleted == [1_700_000_000]
    account.loses_answers = False
    await _delete(account, monkeypatch, _SECOND)
    assert account.deleted == [1_700_000_000, 1_700_000_001]
