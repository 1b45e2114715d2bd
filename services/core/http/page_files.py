"""The files of a service's page: served from memory, with the headers that guard a browser."""

import hashlib
from importlib.resources import files

from aiohttp import hdrs, web

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
GUARDS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def load_files(package: str) -> dict[str, bytes]:
    """The files in the folder `static` of a package, by name. Blocking."""
    return {file.name: file.read_bytes() for file in files(package).joinpath("static").iterdir()}


def add_file(app: web.Application, path: str, name: str, content: bytes) -> None:
    """Serve a file at this path; a browser that has it gets 304. The type is that of its name."""
    kind, etag = _TYPES[name.rpartition(".")[2]], hashlib.sha256(content).hexdigest()[:16]
    headers = {**GUARDS, hdrs.ETAG: f'"{etag}"'}

    async def serve(request: web.Request) -> web.Response:
        if any(tag.value == etag for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=content, content_type=kind, charset="utf-8", headers=headers)

    app.router.add_get(path, serve)
