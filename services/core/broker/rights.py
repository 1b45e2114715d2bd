"""What the user of a service may do on a broker that knows rights: a Kafka with an authorizer.

Before it begins, each service compares what it needs (`services.core.security.service_rights`) with what it has. So a missing
right is named at the start, not when an event needs it. Rights to a topic that does not exist yet are named when they are needed.
"""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from services.core.broker.contract import Broker
from services.core.broker.errors import NotAllowed

Kind = Literal["topic", "group"]


class Right(NamedTuple):
    """operation, kind: as Kafka calls them. name: of the topic or group."""

    operation: str
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.operation} on {self.kind} {self.name}"


@runtime_checkable
class RightsReader(Protocol):
    """An `Admin` of a broker that has rights."""

    async def missing_rights(self, rights: Collection[Right]) -> list[Right]:
        """Those that our user does not have, as far as it can be known. Raises Unavailable."""


async def require_rights(broker: Broker, rights: Sequence[Right]) -> None:
    """Raises NotAllowed with every missing one, and Unavailable. On a broker without rights nothing is missing."""
    if not rights or not isinstance(broker.admin, RightsReader):
        return
    if missing := await broker.admin.missing_rights(rights):
        named = ", ".join(map(str, missing))
        raise NotAllowed(f"our user lacks {named}. Try: ACLs for it, as in docs/kafka.md")
