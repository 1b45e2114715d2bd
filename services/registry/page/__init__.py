"""The page's routes: its files, from memory. It asks the API like any other client."""

import hashlib
from collections.abc import Mapping
from importlib.resources import files

import orjson
from aiohttp import hdrs, web

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_GUARDS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_EMPTY = orjson.dumps({})


def load_files() -> dict[str, bytes]:
    """The page's files by name. Blocking."""
    return {file.name: file.read_bytes() for file in files("services.registry.page").joinpath("static").iterdir()}


def add_page(app: web.Application, page: Mapping[str, bytes]) -> None:
    """Serve the page at / for browsers, and its files at /page/. Clients of Confluent's registry find an empty object at /.

    page: from `load_files`.
    """
    for name, content in page.items():
        if name != "index.html":
            _add_file(app, f"/page/{name}", name, content)
    index = page["index.html"]

    async def root(request: web.Request) -> web.Response:
        if "text/html" in request.headers.get(hdrs.ACCEPT, ""):
            return web.Response(body=index, content_type="text/html", charset="utf-8", headers=_GUARDS)
        return web.Response(body=_EMPTY, content_type="application/json")

    app.router.add_get("/", root)


def _add_file(app: web.Application, path: str, name: str, content: bytes) -> None:
    etag = hashlib.sha256(content).hexdigest()[:16]
    kind = _TYPES[name.rpartition(".")[2]]

    async def serve(request: web.Request) -> web.Response:
        headers = {**_GUARDS, hdrs.ETAG: f'"{etag}"'}
        known = request.if_none_match
        if known is not None and any(tag.value == etag for tag in known):
            return web.Response(status=304, headers=headers)
        return web.Response(body=content, content_type=kind, charset="utf-8", headers=headers)

    app.router.add_get(path, serve)
