"""Where the fleet's processes say their figures."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import orjson

from services.core.address import parse_address

_DNS = "dns://"
_RESOLVE_S = 5.0


class NoTargets(Exception):
    """There is no list of addresses, or it cannot be understood."""


def check_targets(where: str) -> str:
    """A file's path, or dns://name:port. Raises ValueError."""
    if where.startswith(_DNS) and parse_address(where.removeprefix(_DNS))[1] == 0:
        raise ValueError("a management port is needed. Try: dns://fleet:9100")
    return where


async def find_targets(where: str) -> tuple[str, ...]:
    """host:port of each process: what the file lists, or all addresses of the name in dns://name:port. Raises NoTargets."""
    if where.startswith(_DNS):
        return await _resolve(*parse_address(where.removeprefix(_DNS)))
    return await asyncio.to_thread(read_targets, Path(where))


async def _resolve(name: str, port: int) -> tuple[str, ...]:
    """Of one family: a process may have an address in each, and counts once."""
    try:
        async with asyncio.timeout(_RESOLVE_S):
            found = await asyncio.to_thread(socket.getaddrinfo, name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError) as error:
        raise NoTargets(
            f"{name} has no address: {error!r}. Try: a headless Service, or another name in --targets"
        ) from error
    family = min(one[0] for one in found)
    hosts = sorted({str(one[4][0]) for one in found if one[0] == family})
    return tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


def read_targets(path: Path) -> tuple[str, ...]:
    """host:port of each process. Blocking. Raises NoTargets.

    A list as Prometheus' file_sd has it, or the state file of `penstock up` (fleet.json in its data folder).
    """
    try:
        found: Any = orjson.loads(path.read_bytes())
        if isinstance(found, dict):
            return tuple(str(one["management"]) for one in found["processes"] if one["management"])
        return tuple(str(address) for group in found for address in group["targets"])
    except OSError as error:
        raise NoTargets(
            f"{path}: {error.strerror}. Try: --targets with a file_sd file, a fleet's data/fleet.json, or dns://name:port"
        ) from error
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise NoTargets(f"{path}: not a list of targets: {error!r}. Try: infra/prometheus/targets.py") from error
