"""Groups that a process of Penstock resizes, through the routes of its management port (`core.group_control`).

The supervisor of a fleet on one machine resizes its processes; its address is in the state file of the data folder, and the token
is beside it. The transform service resizes its executors.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from services.autoscaler.groups.drivers.contract import (
    TIMEOUT_S,
    Away,
    Group,
    GroupNotFound,
    Member,
    Refused,
    SizeChanged,
    check_step,
)
from services.core.group_control import GroupState, Order
from services.core.security.bearer import read_tokens
from services.core.yaml_source import BadConfiguration


class _State(msgspec.Struct):
    """From fleet.json."""

    management: str


Where = Callable[[], tuple[str, str]]
"""Returns the management address and the token. Blocking. Raises Away."""


class ControlDriver:
    """whose: the groups' owner, for a person. where: asked for each request, because the owner may have been restarted.
    reporters: management ports that report the lag of each group, beside those of its instances."""

    def __init__(
        self, whose: str, where: Where, remedy: str, session: aiohttp.ClientSession, reporters: tuple[str, ...] = ()
    ) -> None:
        self._whose, self._where, self._remedy, self._session = whose, where, remedy, session
        self._reporters = reporters

    async def describe(self, group: str) -> Group:
        try:
            found = msgspec.json.decode(await self._ask("GET", group), type=GroupState)
        except msgspec.MsgspecError as error:
            raise Away(f"{self._whose} gave an unexpected answer: {error}") from error
        members = tuple(Member(one.name, one.address, one.leaving, one.figures) for one in found.instances)
        return Group(found.size, members, reporters=self._reporters)

    async def resize(self, group: str, seen: int, size: int, failed: Collection[str] = ()) -> None:
        """As `GroupDriver.resize`. The owner itself ends an instance that does not drain in time."""
        check_step(seen, size)
        await self._ask("PUT", group, msgspec.json.encode(Order(seen, size, tuple(sorted(failed)))))

    async def replace(self, group: str, instance: str, failed: Collection[str] = ()) -> None:
        """As `GroupDriver.replace`: the owner ends the instance and starts another one."""
        await self._ask("DELETE", f"{group}/{instance}")

    async def _ask(self, method: str, group: str, body: bytes | None = None) -> bytes:
        management, token = await asyncio.to_thread(self._where)
        url = f"http://{management}/v1/groups/{group}"
        try:
            async with self._session.request(
                method, url, data=body, headers={"Authorization": f"Bearer {token}"}, allow_redirects=False
            ) as answer:
                text = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Away(f"{self._whose} does not answer: {error!r}. Try: {self._remedy}") from error
        words = f"{self._whose}: {text[:300].decode(errors='replace')}"
        if answer.status == 404:
            raise GroupNotFound(f"{words}, not {group}")
        if answer.status == 409:
            raise SizeChanged(words)
        if answer.status >= 500:
            raise Away(words)
        if answer.status >= 300:
            raise Refused(words)
        return text


@asynccontextmanager
async def open_fleet(data: str) -> AsyncIterator[ControlDriver]:
    """The processes of the fleet on this data folder."""
    folder = Path(data)

    def where() -> tuple[str, str]:
        try:
            state = msgspec.json.decode((folder / "fleet.json").read_bytes(), type=_State)
            return state.management, (folder / "control.token").read_text(encoding="utf-8")
        except (OSError, msgspec.MsgspecError) as error:
            raise Away(f"no fleet runs on {folder}: {error}. Try: penstock up") from error

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        yield ControlDriver(f"the fleet on {folder}", where, "penstock status", session)


@asynccontextmanager
async def open_executors(address: str, token_file: Path) -> AsyncIterator[ControlDriver]:
    """The executors of the transform service at this management address."""

    def where() -> tuple[str, str]:
        try:
            return address, read_tokens(token_file)[0]
        except BadConfiguration as error:
            raise Away(f"no token for the transform at {address}: {error}") from error

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        yield ControlDriver(f"the transform at {address}", where, "its log", session, reporters=(address,))
