"""Opens a driver by its URL, and joins the drivers of several platforms."""

from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from urllib.parse import parse_qsl, unquote, urlsplit

from services.autoscaler.groups.drivers.aws import open_aws
from services.autoscaler.groups.drivers.contract import Group, GroupDriver, GroupNotFound
from services.autoscaler.groups.drivers.kubernetes import SERVICE_ACCOUNT, open_kubernetes
from services.autoscaler.groups.drivers.management_port import open_fleet
from services.core.http.address import is_loopback

MANAGEMENT_PORT = 9100
_HINT = "fleet:///data, aws://eu-central-1, kubernetes://namespace; ?port=9100 for the instances' management port"


def open_driver(url: str) -> AbstractAsyncContextManager[GroupDriver]:
    """fleet:///folder, aws://region[?port=…&endpoint=…] or kubernetes://namespace[?port=…&endpoint=…&account=…].
    Connects lazily.

    port: of the instances' management. endpoint: replaces the platform's own. account: the folder with token and
    ca.crt. Raises ValueError.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    port, endpoint = _port(query.pop("port", str(MANAGEMENT_PORT))), query.pop("endpoint", None)
    account = query.pop("account", SERVICE_ACCOUNT)
    if query:
        raise ValueError(f"a driver's URL has no option {', '.join(sorted(query))}. Try: {_HINT}")
    if parts.scheme == "fleet" and not parts.netloc and parts.path.startswith("/"):
        return open_fleet(unquote(parts.path))
    if parts.scheme == "aws" and parts.hostname and parts.path in ("", "/"):
        return open_aws(parts.hostname, port, endpoint)
    if parts.scheme == "kubernetes" and parts.hostname and parts.path in ("", "/"):
        _check_endpoint(endpoint)
        return open_kubernetes(parts.hostname, port, endpoint, account)
    raise ValueError(f"no driver for {url}. Try: {_HINT}")


class JoinedDrivers:
    """Sends each call to the driver of its group. others: of the groups that are not in `by_group`; None: there are none."""

    def __init__(self, by_group: dict[str, GroupDriver], others: GroupDriver | None) -> None:
        self._by_group, self._others = by_group, others

    async def describe(self, group: str) -> Group:
        return await self._of(group).describe(group)

    async def resize(self, group: str, seen: int, size: int, failed: Collection[str] = ()) -> None:
        await self._of(group).resize(group, seen, size, failed)

    async def replace(self, group: str, instance: str, failed: Collection[str] = ()) -> None:
        await self._of(group).replace(group, instance, failed)

    def _of(self, group: str) -> GroupDriver:
        driver = self._by_group.get(group, self._others)
        if driver is None:
            raise GroupNotFound(f"no platform has the group {group}. Try: set group_driver")
        return driver


def check_driver(url: str) -> str:
    """The URL. Raises ValueError."""
    open_driver(url)
    return url


def _check_endpoint(endpoint: str | None) -> None:
    """The service account's token goes there."""
    where = urlsplit(endpoint or "https:")
    if where.scheme != "https" and not (where.scheme == "http" and is_loopback(where.hostname or "")):
        raise ValueError(f"a token must not go to {endpoint} in clear. Try: endpoint=https://…")


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 65535):
        raise ValueError(f"not a port: {text}. Try: {_HINT}")
    return int(text)
