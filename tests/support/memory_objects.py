"""A store of the registry in memory: create-only objects, with faults where a test says so."""

import asyncio
from collections.abc import Callable, Sequence

from services.registry.objects import StoreUnavailable


class MemoryObjects:
    """contents: by name. fault: called with a name before it is created: None, `before` (nothing happens) or `after` (it is
    created, and the answer is lost). away: nothing answers. created: the names, in order."""

    url = "memory"
    failed: str | None = None

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.fault: Callable[[str], str | None] = lambda _name: None
        self.away = False
        self.created: list[str] = []
        self.reads = 0

    async def create(self, name: str, content: bytes) -> bool:
        fault = self.fault(name)
        await asyncio.sleep(0)
        if self.away or fault == "before":
            raise StoreUnavailable("memory: no answer")
        is_new = name not in self.contents
        if is_new:
            self.contents[name] = content
            self.created.append(name)
        if fault == "after":
            raise StoreUnavailable("memory: the answer was lost")
        return is_new

    async def get(self, names: Sequence[str]) -> list[bytes | None]:
        await asyncio.sleep(0)
        if self.away:
            raise StoreUnavailable("memory: no answer")
        self.reads += len(names)
        return [self.contents.get(name) for name in names]

    async def names_after(self, name: str) -> list[str]:
        await asyncio.sleep(0)
        if self.away:
            raise StoreUnavailable("memory: no answer")
        folder = name.rpartition("/")[0]
        return sorted(one for one in self.contents if one.startswith(f"{folder}/") and one > name)

    def alter(self, name: str) -> bytes:
        """Change one byte of an object; returns what it was."""
        before = self.contents[name]
        self.contents[name] = before[:-2] + bytes([before[-2] ^ 1]) + before[-1:]
        return before
