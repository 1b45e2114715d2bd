"""Groups as processes of the fleet on this machine, resized through the supervisor's management port.

The supervisor's address is in the state file of the data folder; the token beside it authorizes the request.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
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


class _State(msgspec.Struct):
    """From fleet.json."""

    management: str


class _Answer(msgspec.Struct):
    size: int
    instances: tuple[Member, ...]


class FleetDriver:
    """The supervisor of one data folder. Reads its files for each request, because it may have been restarted."""

    def __init__(self, data: Path, session: aiohttp.ClientSession) -> None:
        self._data, self._session = data, session

    async def describe(self, group: str) -> Group:
        try:
            found = msgspec.json.decode(await self._ask("GET", group), type=_Answer)
        except msgspec.MsgspecError as error:
            raise Away(f"the supervisor on {self._data} gave an unexpected answer: {error}") from error
        return Group(found.size, found.instances)

    async def resize(self, group: str, seen: int, size: int, failed: Collection[str] = ()) -> None:
        """As `GroupDriver.resize`. The supervisor itself ends a process that does not drain in time."""
        check_step(seen, size)
        order = {"seen": seen, "size": size, "failed": sorted(failed)}
        await self._ask("PUT", group, msgspec.json.encode(order))

    async def replace(self, group: str, instance: str, failed: Collection[str] = ()) -> None:
        """As `GroupDriver.replace`: the supervisor ends the process and starts it again."""
        await self._ask("DELETE", f"{group}/{instance}")

    async def _ask(self, method: str, group: str, body: bytes | None = None) -> bytes:
        management, token = await asyncio.to_thread(self._read_files)
        url = f"http://{management}/v1/groups/{group}"
        try:
            async with self._session.request(
                method, url, data=body, headers={"Authorization": f"Bearer {token}"}
            ) as answer:
                text = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Away(f"the supervisor on {self._data} does not answer: {error!r}. Try: penstock status") from error
        words = f"the fleet on {self._data}: {text[:300].decode(errors='replace')}"
        if answer.status == 404:
            raise GroupNotFound(f"{words}, not {group}")
        if answer.status == 409:
            raise SizeChanged(words)
        if answer.status >= 500:
            raise Away(words)
        if answer.status >= 300:
            raise Refused(words)
        return text

    def _read_files(self) -> tuple[str, str]:
        """Blocking."""
        try:
            state = msgspec.json.decode((self._data / "fleet.json").read_bytes(), type=_State)
            return state.management, (self._data / "control.token").read_text(encoding="utf-8")
        except (OSError, msgspec.MsgspecError) as error:
            raise Away(f"no fleet runs on {self._data}: {error}. Try: penstock up") from error


@asynccontextmanager
async def open_fleet(data: str) -> AsyncIterator[FleetDriver]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        yield FleetDriver(Path(data), session)
