"""As much of the Kubernetes API as a driver of groups meets: scale, pods, versions, rights. Pods leave when `finish` says so."""

from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TOKEN = "the-account's-token"
_FAILURES = {403: web.HTTPForbidden, 429: web.HTTPTooManyRequests, 503: web.HTTPServiceUnavailable}


@dataclass
class FakeCluster:
    """One namespace with one Deployment. `pods`: name -> whether it was deleted and drains."""

    deployment: str
    replicas: int
    version: int = 1
    pods: dict[str, bool] = field(default_factory=dict)
    made: int = 0
    annotations: dict[str, str] | None = field(default_factory=dict)
    """None: the Role does not allow to read them."""
    fails: int | None = None
    """Answer everything with this status."""

    def __post_init__(self) -> None:
        self._reconcile()

    def app(self) -> web.Application:
        app = web.Application()
        path = "/apis/apps/v1/namespaces/penstock/deployments/{name}/scale"
        app.add_routes([web.get(path, self.get_scale), web.put(path, self.put_scale)])
        app.add_routes([web.get(path.removesuffix("/scale"), self.get_deployment)])
        pods = "/api/v1/namespaces/penstock/pods"
        app.add_routes([web.get(pods, self.list_pods), web.delete(pods + "/{pod}", self.delete_pod)])
        return app

    def finish(self) -> None:
        """What drains has drained."""
        self.pods = {name: leaving for name, leaving in self.pods.items() if not leaving}

    async def get_scale(self, request: web.Request) -> web.Response:
        self._check(request)
        return web.json_response(self._scale())

    async def put_scale(self, request: web.Request) -> web.Response:
        self._check(request)
        order = await request.json()
        if order["metadata"]["resourceVersion"] != str(self.version):
            raise web.HTTPConflict(text='{"message": "the object has been modified"}')
        self.replicas = order["spec"]["replicas"]
        self.version += 1
        self._reconcile()
        return web.json_response(self._scale())

    async def get_deployment(self, request: web.Request) -> web.Response:
        self._check(request)
        if self.annotations is None:
            raise web.HTTPForbidden(text='{"message": "cannot get resource deployments"}')
        return web.json_response({"metadata": {"name": self.deployment, "annotations": self.annotations}, "spec": {}})

    async def delete_pod(self, request: web.Request) -> web.Response:
        self._check(request)
        self.pods[request.match_info["pod"]] = True
        self._reconcile()
        return web.json_response({})

    async def list_pods(self, request: web.Request) -> web.Response:
        self._check(request)
        assert request.query["labelSelector"] == "app.kubernetes.io/name=expel"
        items: list[dict[str, Any]] = [
            {
                "metadata": {"name": name, **({"deletionTimestamp": "2026-11-21T08:00:00Z"} if leaving else {})},
                "status": {"phase": "Running", "podIP": f"10.0.0.{number}"},
            }
            for number, (name, leaving) in enumerate(self.pods.items(), 1)
        ]
        items.append({"metadata": {"name": "evicted"}, "status": {"phase": "Failed", "podIP": "10.0.0.99"}})
        return web.json_response({"kind": "PodList", "items": items})

    def _check(self, request: web.Request) -> None:
        if self.fails is not None:
            raise _FAILURES[self.fails](text='{"message": "no"}')
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise web.HTTPUnauthorized(text='{"message": "Unauthorized"}')
        if request.match_info.get("name", self.deployment) != self.deployment:
            raise web.HTTPNotFound(text='{"message": "deployments.apps not found"}')

    def _scale(self) -> dict[str, Any]:
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": self.deployment, "namespace": "penstock", "resourceVersion": str(self.version)},
            "spec": {"replicas": self.replicas},
            "status": {"replicas": len(self.pods), "selector": "app.kubernetes.io/name=expel"},
        }

    def _reconcile(self) -> None:
        staying = [name for name, leaving in self.pods.items() if not leaving]
        for name in staying[self.replicas :]:
            self.pods[name] = True
        for _ in range(self.replicas - len(staying)):
            self.made += 1
            self.pods[f"expel-{self.made}"] = False
