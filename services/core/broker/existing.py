"""Topics of others on a Kafka cluster: by which names a fleet knows them, and how their records become events.

A fleet reads such a topic under the name of its stream, and writes one under `target_name`. Only the Kafka backend knows their
names on the cluster, which never have the fleet's prefix. The records become events directly behind the fetch, so nothing above
the backend knows a difference. Nothing creates, changes or deletes these topics: the backend refuses it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.core.broker.record import Batch
from services.core.broker.several.brokers import DEFAULT

Translate = Callable[[Batch, str], Batch]
"""Makes events of the records of one topic, with the same offsets. The arguments: a batch under the topic's name on the cluster,
and the topic's id. Never raises."""


@dataclass(frozen=True)
class ExistingTopics:
    """names: the topic on the cluster, by its name in the fleet. translate: by the name on the cluster, of those that are
    read. own: the fleet's names of its own topics."""

    names: Mapping[str, str] = field(default_factory=dict)
    translate: Mapping[str, Translate] = field(default_factory=dict)
    own: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.names)

    def find_own(self, prefix: str) -> list[str]:
        """Those of these topics that are the fleet's own, by their names on the cluster. prefix: of the fleet's names."""
        return sorted(
            topic
            for topic in set(self.names.values())
            if topic.startswith(prefix)
            and ((name := topic.removeprefix(prefix)) in self.own or name.startswith("penstock."))
        )


NO_EXISTING = ExistingTopics()


def target_name(topic: str, broker: str = DEFAULT) -> str:
    """The name in the fleet of a topic of others that it writes to, on this broker. No topic of Kafka has a colon in its name."""
    return f"existing:{topic}" if broker == DEFAULT else f"existing:{broker}:{topic}"
