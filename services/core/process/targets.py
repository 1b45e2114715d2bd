"""The list of a fleet's processes: the same file that Prometheus reads, the state file of `penstock up`, or a name in DNS."""

import asyncio
import socket
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from services.core.http.address import parse_address

_DNS = "dns://"
_RESOLVE_S = 5.0


class NoTargets(Exception):
    """The list of addresses is missing or invalid."""


class Target(NamedTuple):
    """One process. address: host:port of its management port. service, name: empty where the list does not have them."""

    address: str
    service: str = ""
    name: str = ""


def check_targets(where: str) -> str:
    """A file's path, or dns://name:port. Raises ValueError."""
    if where.startswith(_DNS) and parse_address(where.removeprefix(_DNS))[1] == 0:
        raise ValueError("a management port is needed. Try: dns://fleet:9100")
    return where


async def find_targets(where: str) -> tuple[Target, ...]:
    """Each process: those of the file, or all addresses of the name in dns://name:port. Raises NoTargets."""
    if where.startswith(_DNS):
        return await _resolve(*parse_address(where.removeprefix(_DNS)))
    return await asyncio.to_thread(read_targets, Path(where))


async def _resolve(name: str, port: int) -> tuple[Target, ...]:
    """Addresses of one family only: a process with an address in each counts once."""
    try:
        async with asyncio.timeout(_RESOLVE_S):
            found = await asyncio.to_thread(socket.getaddrinfo, name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError) as error:
        raise NoTargets(
            f"{name} has no address: {error!r}. Try: a headless Service, or another name in --targets"
        ) from error
    family = min(one[0] for one in found)
    hosts = sorted({str(one[4][0]) for one in found if one[0] == family})
    return tuple(Target(f"[{host}]:{port}" if ":" in host else f"{host}:{port}") for host in hosts)


def read_targets(path: Path) -> tuple[Target, ...]:
    """Each process, from a list in the format of Prometheus' file_sd (labels `component` and `process`), or from the state file
    of `penstock up` (fleet.json in its data folder). Blocking. Raises NoTargets."""
    try:
        found: Any = orjson.loads(path.read_bytes())
        if isinstance(found, dict):
            processes = [one for one in found["processes"] if one["management"]]
            return tuple(
                Target(str(one["management"]), one.get("service", ""), one.get("name", "")) for one in processes
            )
        return tuple(
            Target(str(address), str(labels.get("component", "")), str(labels.get("process", "")))
            for group in found
            for labels in [group.get("labels", {})]
            for address in group["targets"]
        )
    except OSError as error:
        raise NoTargets(
            f"{path}: {error.strerror}. Try: --targets with a file_sd file, a fleet's data/fleet.json, or dns://name:port"
        ) from error
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise NoTargets(f"{path}: not a list of targets: {error!r}. Try: infra/prometheus/targets.py") from error
