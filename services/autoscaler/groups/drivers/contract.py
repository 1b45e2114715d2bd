"""What a platform must do: report a group's size and instances, and accept another size.

A driver makes one attempt, within `TIMEOUT_S`, and classifies the error; the scaler tries again in its next round.

A new driver is a file here that implements `GroupDriver`; `open.py` opens it by the scheme of its URL. Its harness goes into
`tests/unit/autoscaler/drivers/harness.py`: the contract suite beside it then runs against the driver. The help of the setting
in `services/autoscaler/settings.py` and the error in `services/autoscaler/app.py` list the URLs;
docs/scaling-groups.md describes them.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from services.core.group_control import Figures

TIMEOUT_S = 10.0


class DriverError(Exception):
    """The platform did not do it. The message is for a person and says what to try."""


class Away(DriverError):
    """It does not answer, or is overloaded. It may answer later."""


class GroupNotFound(DriverError):
    """It has no group of this name."""


class SizeChanged(DriverError):
    """The group is not as it was seen, or an instance is leaving already. Describe it again before deciding."""


class Refused(DriverError):
    """It refuses, and will refuse again: a right, a limit or a drain is missing."""


@dataclass(frozen=True, slots=True)
class Member:
    """An instance as the platform reports it. address: host:port of its management port, None before it has one.

    leaving: it was ordered to leave, and drains. An instance that is gone is no member. figures: from the platform, when the
    instance never has a management port; else None.
    """

    name: str
    address: str | None
    leaving: bool
    figures: Figures | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """size: the ordered number of instances, without those that leave; 0 when a person has switched the group off.

    frozen: the text of FROZEN on the platform's object; None without it. problem: why FROZEN could not be read; None when it was.
    reporters: management ports of others that report the group's lag.
    """

    size: int
    members: tuple[Member, ...]
    frozen: str | None = None
    problem: str | None = None
    reporters: tuple[str, ...] = ()


FROZEN = "penstock.dev/frozen"
"""The annotation or tag by which a person freezes a group on its platform. Its text is the reason; `false` means not frozen."""


def frozen_by(text: str | None) -> str | None:
    """The reason in FROZEN; None when it does not freeze the group."""
    if text is None or text.strip().lower() == "false":
        return None
    return text.strip() or "no reason given"


class GroupDriver(Protocol):
    """One platform. A group's name is the platform's own: a service of the fleet, an Auto Scaling group, a Deployment."""

    async def describe(self, group: str) -> Group:
        """The group now. Raises Away, GroupNotFound, Refused."""

    async def resize(self, group: str, seen: int, size: int, failed: Collection[str] = ()) -> None:
        """Order another size than the `seen` one: more, or one fewer. Does not wait until it is reached.

        A leaving instance gets SIGTERM and its whole drain time. failed: names of instances. One of them leaves first, where
        the platform lets us choose. Those of them that leave already are not waited for, where nothing else ends them.
        Raises SizeChanged when the size is not `seen`, or another instance is leaving and `size` is smaller; Away,
        GroupNotFound, Refused; ValueError for another step.
        """

    async def replace(self, group: str, instance: str, failed: Collection[str] = ()) -> None:
        """Order the end of an instance; the platform starts another one in its place. The size stays. Does not wait.

        The instance gets SIGTERM and its whole drain time. failed: as in `resize`. Raises SizeChanged when the instance is gone,
        or another one is leaving; Away, GroupNotFound, Refused.
        """


@asynccontextmanager
async def one_attempt(platform: str) -> AsyncIterator[None]:
    """A decorator: all requests of one call within `TIMEOUT_S`. Raises Away."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield
    except TimeoutError as error:
        raise Away(f"{platform} does not answer within {TIMEOUT_S:.0f} s") from error


def check_step(seen: int, size: int) -> None:
    """Raise ValueError for a size that no driver accepts."""
    if size < 1 or size < seen - 1:
        raise ValueError(
            f"a group cannot go from {seen} to {size} instances: one fewer at a time, and at least one stays"
        )
