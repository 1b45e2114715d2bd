"""Members that were killed on this machine leave their group at once, instead of after the session time-out.

A killed process cannot leave its group, so Kafka waits for its heartbeats. But a member's client id names its process, and
this machine's kernel knows whether that process still runs. A frozen process still runs, so its member stays. So do members of
other machines, containers and boots. If a living member is removed by mistake, Kafka refuses its commits, and it joins again.
"""

import asyncio
from pathlib import Path

import structlog
from aiokafka.protocol.admin import DescribeGroupsRequest
from aiokafka.protocol.group import LeaveGroupRequest

from services.core.broker.errors import BrokerError
from services.core.broker.kafka.cluster import Cluster

log = structlog.get_logger()

_PROC = Path("/proc")
_SEPARATOR = "@"


def name_process() -> str:
    """`boot:namespace:pid:start` of this process, unique over all machines and boots; "" when it is not known. Blocking."""
    try:
        pid = int((_PROC / "self").readlink().name)
        return f"{_name_scope()}:{pid}:{_start_of(pid)}"
    except OSError:
        return ""


def client_id(group: str, process: str) -> str:
    """The client id of a member of this process."""
    return f"penstock-{group}{_SEPARATOR}{process}"


def is_dead(client: str) -> bool:
    """Whether this client id's process ran here and has ended. Blocking."""
    boot, _, rest = client.rpartition(_SEPARATOR)[2].partition(":")
    namespace, _, rest = rest.partition(":")
    pid, _, start = rest.partition(":")
    if not pid.isdecimal() or not start:
        return False
    try:
        return f"{boot}:{namespace}" == _name_scope() and _start_of(int(pid)) != start
    except OSError:
        return False


def _name_scope() -> str:
    """The boot, and the namespace in which process ids count (a container's)."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{(_PROC / 'self/ns/pid').readlink().name.strip('pid:[]')}"


def _start_of(pid: int) -> str:
    """When a running process started, in ticks since boot; "" when none with this id runs."""
    try:
        state, *fields = (_PROC / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in "ZX" else fields[18]


async def evict_dead(cluster: Cluster, group: str) -> None:
    """Remove dead members from the group. Raises no BrokerError: without it joining only takes longer."""
    try:
        answer = await cluster.ask_coordinator(group, DescribeGroupsRequest([group]))
        for _, _, _, _, _, members, *_ in answer.groups:
            for member, client, *_ in members:
                if await asyncio.to_thread(is_dead, client):
                    await cluster.ask_coordinator(group, LeaveGroupRequest(group, member))
                    log.info("kafka_dead_member_evicted", group=group, member=client)
    except BrokerError as error:
        log.info("kafka_eviction_failed", group=group, error=str(error))
