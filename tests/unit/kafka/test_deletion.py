"""What Kafka answers to a deletion by the topic's id."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from services.core.broker.errors import BrokerError, NotAllowed, Unavailable, UnknownTopic
from services.core.broker.kafka.admin import KafkaAdmin
from services.core.broker.kafka.cluster import Timing, TopicState

_ID = "3d9c2b1e-0f4a-4c55-8f7e-3a5b6c7d8e9f"
_OTHER = "11111111-0f4a-4c55-8f7e-3a5b6c7d8e9f"


class _Cluster:
    """With a topic, as its node lists it `looks` times more. answer: the code and the message, or what is raised."""

    timing, access = Timing(), None

    def __init__(self, answer: tuple[int, str | None] | BrokerError, looks: int = 0) -> None:
        self.answer, self.looks, self.asked = answer, looks, list[Any]()

    async def ask_any(self, request: Any) -> Any:
        self.asked.append(request)
        if isinstance(self.answer, BrokerError):
            raise self.answer
        code, message = self.answer
        return SimpleNamespace(responses=[(None, UUID(_ID), code, message, {})])

    async def describe_by_node(self, _topics: list[str]) -> AsyncIterator[dict[str, TopicState]]:
        self.looks -= 1
        yield {"t": TopicState({}, internal=False, id=_ID if self.looks >= 0 else _OTHER)}


async def _delete(cluster: _Cluster, incarnation: str = _ID) -> None:
    async def append(*_: object) -> None:
        raise AssertionError("nothing is written")

    await KafkaAdmin(cluster, append).delete_topic("t", incarnation)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "message", "kind", "text"),
    [
        (29, None, NotAllowed, "Delete on topic t"),
        (73, "Topic deletion is disabled.", BrokerError, "delete topic t: Topic deletion is disabled"),
        (42, None, BrokerError, "delete topic t: refused"),
        (41, None, Unavailable, "delete topic t"),
        (7, None, Unavailable, "delete topic t"),
        (100, None, UnknownTopic, "is gone"),
    ],
)
async def test_a_refusal_says_why(code: int, message: str | None, kind: type[BrokerError], text: str) -> None:
    """Broken: a topic that Kafka keeps counts as deleted; nobody learns why it stays; or what waiting mends ends a move."""
    cluster = _Cluster((code, message))
    with pytest.raises(kind, match=text) as refused:
        await _delete(cluster)
    assert (type(refused.value), cluster.looks) == (kind, 0), "it waits for the end of a topic that stays"


async def test_it_is_gone_when_no_node_lists_this_one() -> None:
    """Broken: it waits for the end of somebody's new topic of this name; or returns while a node still gives records of it."""
    cluster = _Cluster((0, None), looks=2)
    await _delete(cluster)
    assert (len(cluster.asked), cluster.looks) == (1, -1)


async def test_a_lost_answer_and_an_id_of_another_kind_of_broker_delete_nothing_else() -> None:
    """Broken: the repeat deletes the topic that has the name by now."""
    cluster = _Cluster(Unavailable("no answer from Kafka within 7 s"))
    with pytest.raises(Unavailable):
        await _delete(cluster)
    cluster.answer = (100, None)
    with pytest.raises(UnknownTopic):
        await _delete(cluster)
    topics = [request.build(lambda *arguments: arguments)[0] for request in cluster.asked]
    assert topics == [[(None, UUID(_ID), {})]] * 2
    with pytest.raises(UnknownTopic, match="another id"):
        await _delete(cluster, "1:t:1700000000")
    assert len(cluster.asked) == 2
