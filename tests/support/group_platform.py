"""A platform with one group, `expel`, whose instances somebody else starts: for an autoscaler that only looks (`dry_run`).

It answers as the supervisor of `penstock up` does, and its address and token are in the files where an autoscaler of any version
looks for them.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from services.core.group_control import GroupControl, GroupState, Instance, SizeRefused
from services.core.security.bearer import Tokens, make_token
from tests.support.ports import free_port
from tests.support.serving import serve_on_loopback

GROUP = "expel"


class _Groups:
    """instances: the management addresses, by name, as they are now."""

    names: Collection[str] = (GROUP,)

    def __init__(self, instances: Callable[[], Mapping[str, str]]) -> None:
        self._instances = instances

    async def describe(self, group: str) -> GroupState:
        found = tuple(Instance(name, address, leaving=False) for name, address in self._instances().items())
        return GroupState(len(found), found)

    async def resize(self, group: str, seen: int, size: int, failed: Collection[str]) -> None:
        raise SizeRefused("an autoscaler that only looks ordered a size", again=False)

    async def replace(self, group: str, name: str) -> None:
        raise SizeRefused("an autoscaler that only looks replaced an instance", again=False)


@asynccontextmanager
async def open_group_platform(folder: Path, instances: Callable[[], Mapping[str, str]]) -> AsyncIterator[list[str]]:
    """folder: for its files. Gives the flags of an autoscaler that looks at the group every second."""
    token, port = make_token(), free_port()
    await asyncio.to_thread(_write_files, folder, token, f"127.0.0.1:{port}")
    app = web.Application()
    app.router.add_routes(GroupControl(_Groups(instances), Tokens([token]), whose="the platform").routes())
    async with serve_on_loopback(app, port):
        rules = json.dumps({GROUP: {"max": 4}})
        yield ["--group-driver", f"fleet://{folder}", "--groups", rules, "--group-every", "1s", "--dry-run", "true"]


def _write_files(folder: Path, token: str, address: str) -> None:
    folder.mkdir()
    (folder / "control.token").write_text(token)
    (folder / "fleet.json").write_text(json.dumps({"management": address}))
