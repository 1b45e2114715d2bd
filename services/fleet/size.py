"""Which sizes the processes of a service may be given while the fleet runs."""

from collections.abc import Mapping

RESIZABLE: Mapping[str, int] = {"ingest": 64, "expel": 64, "retrier": 10}
"""Service to the most processes. Of the others there is one, always."""


class SizeRefused(ValueError):
    """The size cannot be had, or not now; the message is for a person. again: whether it may be had later."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again


def refuse_size(service: str, staying: int, leaving: int, seen: int, size: int, open_: bool) -> None:
    """Raise SizeRefused unless `size` may be ordered by somebody who saw `seen`. One process leaves at a time."""
    if service not in RESIZABLE:
        raise SizeRefused(f"{service} always has the same processes", again=False)
    if not 1 <= size <= RESIZABLE[service]:
        raise SizeRefused(f"{service}: from 1 to {RESIZABLE[service]} processes", again=False)
    if size < seen - 1:
        raise SizeRefused(f"{service}: one process fewer at a time", again=False)
    if not open_:
        raise SizeRefused("the fleet is starting or stopping", again=True)
    if not staying:
        raise SizeRefused(f"this fleet has no {service} to make more of", again=False)
    if seen != staying:
        raise SizeRefused(f"{service} has {staying} processes, not {seen}", again=True)
    if size < seen and leaving:
        raise SizeRefused(f"a process of {service} is draining already", again=True)
