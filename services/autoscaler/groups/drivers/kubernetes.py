"""Groups as Kubernetes Deployments, resized through the scale subresource with the pod's own service account.

Needs `get` and `update` on deployments/scale, `get` on deployments, `list` and `delete` on pods. A leaving pod gets SIGTERM
and its grace period, which must be longer than the drain. The resource version makes an order fail if the size was changed
meanwhile.
"""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson

from services.autoscaler.groups.drivers.contract import (
    FROZEN,
    TIMEOUT_S,
    Away,
    Group,
    GroupNotFound,
    Member,
    Refused,
    SizeChanged,
    check_step,
    frozen_by,
    one_attempt,
)

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_OVER = ("Succeeded", "Failed")


class _Meta(msgspec.Struct, rename="camel"):
    name: str = ""
    deletion_timestamp: str | None = None
    annotations: dict[str, str] = msgspec.field(default_factory=dict)


class _PodStatus(msgspec.Struct):
    phase: str = ""
    pod_ip: str | None = msgspec.field(default=None, name="podIP")


class _Pod(msgspec.Struct):
    metadata: _Meta
    status: _PodStatus


class _Pods(msgspec.Struct):
    items: list[_Pod]


class _Deployment(msgspec.Struct):
    metadata: _Meta


class _Size(msgspec.Struct):
    replicas: int = 0
    selector: str = ""


class _Scale(msgspec.Struct):
    spec: _Size
    status: _Size


class KubernetesDriver:
    """The Deployments of one namespace."""

    def __init__(self, namespace: str, port: int, endpoint: str, account: Path, session: aiohttp.ClientSession) -> None:
        self._namespace, self._port, self._endpoint = namespace, port, endpoint.rstrip("/")
        self._account, self._session = account, session

    @one_attempt("the Kubernetes API")
    async def describe(self, group: str) -> Group:
        scale = _decode(await self._ask("GET", self._scale(group)), _Scale)
        pods = await self._pods(scale.status.selector)
        try:
            found = _decode(await self._ask("GET", self._deployment(group)), _Deployment)
        except Refused as error:  # the Role of an earlier version: it scales as before
            return Group(scale.spec.replicas, pods, problem=f"annotations cannot be read: {error}")
        return Group(scale.spec.replicas, pods, frozen_by(found.metadata.annotations.get(FROZEN)))

    @one_attempt("the Kubernetes API")
    async def resize(self, group: str, seen: int, size: int, failed: Collection[str] = ()) -> None:
        """As `GroupDriver.resize`. Kubernetes chooses the leaving pod: first one that is not ready."""
        check_step(seen, size)
        raw = await self._ask("GET", self._scale(group))
        scale = _decode(raw, _Scale)
        if scale.spec.replicas != seen:
            raise SizeChanged(f"Deployment {group} has {scale.spec.replicas} replicas, not {seen}")
        if size < seen:
            await self._staying(group, scale.status.selector, failed)
        order: dict[str, Any] = orjson.loads(raw)  # as received, with its resource version
        order["spec"]["replicas"] = size
        await self._ask("PUT", self._scale(group), body=orjson.dumps(order))

    @one_attempt("the Kubernetes API")
    async def replace(self, group: str, instance: str, failed: Collection[str] = ()) -> None:
        """As `GroupDriver.replace`: the Deployment replaces a deleted pod."""
        scale = _decode(await self._ask("GET", self._scale(group)), _Scale)
        if instance not in await self._staying(group, scale.status.selector, failed):
            raise SizeChanged(f"pod {instance} is not in Deployment {group}, or leaves already")
        await self._ask("DELETE", f"/api/v1/namespaces/{self._namespace}/pods/{instance}")

    async def _staying(self, group: str, selector: str, failed: Collection[str]) -> set[str]:
        """The pods of which one may leave now. Raises SizeChanged."""
        pods = await self._pods(selector)
        if any(pod.leaving and pod.name not in failed for pod in pods):
            raise SizeChanged(f"a pod of Deployment {group} is leaving already")
        return {pod.name for pod in pods if not pod.leaving}

    async def _pods(self, selector: str) -> tuple[Member, ...]:
        if not selector:
            raise Refused("the Deployment has no selector, so its pods are unknown")
        raw = await self._ask("GET", f"/api/v1/namespaces/{self._namespace}/pods", {"labelSelector": selector})
        return tuple(
            Member(
                pod.metadata.name,
                f"{_host(pod.status.pod_ip)}:{self._port}" if pod.status.pod_ip else None,
                pod.metadata.deletion_timestamp is not None,
            )
            for pod in _decode(raw, _Pods).items
            if pod.status.phase not in _OVER
        )

    def _deployment(self, group: str) -> str:
        return f"/apis/apps/v1/namespaces/{self._namespace}/deployments/{group}"

    def _scale(self, group: str) -> str:
        return f"{self._deployment(group)}/scale"

    async def _ask(
        self, method: str, path: str, query: dict[str, str] | None = None, body: bytes | None = None
    ) -> bytes:
        token = await asyncio.to_thread(self._read_token)  # it is renewed in place
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            async with self._session.request(
                method, self._endpoint + path, params=query, data=body, headers=headers, allow_redirects=False
            ) as answer:
                text = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Away(f"the Kubernetes API at {self._endpoint} does not answer: {error!r}") from error
        if answer.status >= 300:
            _raise(answer.status, f"{method} {path}: {_message(text)}")
        return text

    def _read_token(self) -> str:
        """Blocking."""
        try:
            return (self._account / "token").read_text(encoding="utf-8").strip()
        except OSError as error:
            raise Refused(
                f"no service account in {self._account}: {error.strerror}. Try: set serviceAccountName in the pod"
            ) from error


def _raise(status: int, words: str) -> None:
    if status == 404:
        raise GroupNotFound(words)
    if status == 409:
        raise SizeChanged(words)
    if status == 429 or status >= 500:
        raise Away(words)
    remedy = (
        ". Try: a Role with deployments (get), deployments/scale (get, update) and pods (list, delete)"
        if status == 403
        else ""
    )
    raise Refused(words + remedy)


def _decode(raw: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise Away(f"the Kubernetes API gave an unexpected answer: {error}") from error


def _message(text: bytes) -> str:
    try:
        return str(orjson.loads(text)["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return text[:300].decode(errors="replace")


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


@asynccontextmanager
async def open_kubernetes(
    namespace: str, port: int, endpoint: str | None, account: str
) -> AsyncIterator[KubernetesDriver]:
    """Without an endpoint it is the cluster of this pod. Raises Refused."""
    folder = Path(account)
    if endpoint is None:
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        if host is None:
            raise Refused("this runs in no Kubernetes cluster. Try: kubernetes://namespace?endpoint=https://…")
        endpoint = f"https://{_host(host)}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
    trust = await asyncio.to_thread(_trust, folder) if endpoint.startswith("https:") else True
    connector = aiohttp.TCPConnector(ssl=trust)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
        yield KubernetesDriver(namespace, port, endpoint, folder, session)


def _trust(account: Path) -> ssl.SSLContext:
    """Trusts only the cluster's own authority. Blocking."""
    try:
        return ssl.create_default_context(cafile=str(account / "ca.crt"))
    except (OSError, ssl.SSLError) as error:
        raise Refused(
            f"{account / 'ca.crt'} cannot be used: {error}. Try: set serviceAccountName in the pod"
        ) from error
