"""The groups of a running fleet, for the routes that show and resize them."""

from collections.abc import Callable, Collection, Mapping, Sequence

from services.core.group_control import GroupState, Instance, SizeRefused
from services.fleet.process import ServiceProcess

RESIZABLE: Mapping[str, int] = {"ingest": 64, "expel": 64, "retrier": 10}
"""The maximum number of processes by service. Every other service has exactly one."""


def refuse_size(service: str, staying: int, leaving: int, seen: int, size: int, open_: bool) -> None:
    """Raise SizeRefused unless a caller that knows the size `seen` may order `size`. One process leaves at a time."""
    if service not in RESIZABLE:
        raise SizeRefused(f"{service} always has the same processes", again=False)
    if not 1 <= size <= RESIZABLE[service]:
        raise SizeRefused(f"{service}: from 1 to {RESIZABLE[service]} processes", again=False)
    if size < seen - 1:
        raise SizeRefused(f"{service}: one process fewer at a time", again=False)
    if not open_:
        raise SizeRefused("the fleet is starting or stopping", again=True)
    if not staying:
        raise SizeRefused(f"this fleet runs no {service}", again=False)
    if seen != staying:
        raise SizeRefused(f"{service} has {staying} processes, not {seen}", again=True)
    if size < seen and leaving:
        raise SizeRefused(f"a process of {service} is draining already", again=True)


Resize = Callable[[str, int, int, Collection[str]], None]
Replace = Callable[[str, str], None]


class ProcessGroups:
    """As `core.group_control.Groups`.

    of: returns the processes of a service. resize, replace: as `Fleet.resize` and `Fleet.replace`.
    """

    names = RESIZABLE.keys()

    def __init__(self, of: Callable[[str], Sequence[ServiceProcess]], resize: Resize, replace: Replace) -> None:
        self._of, self._resize, self._replace = of, resize, replace

    async def describe(self, group: str) -> GroupState:
        """Each process with its management address; None while it does not run."""
        processes = self._of(group)
        instances = tuple(Instance(p.spec.name, p.management if p.pid else None, p.leaving) for p in processes)
        return GroupState(sum(not one.leaving for one in processes), instances)

    async def resize(self, group: str, seen: int, size: int, failed: Collection[str]) -> None:
        self._resize(group, seen, size, failed)

    async def replace(self, group: str, name: str) -> None:
        self._replace(group, name)
