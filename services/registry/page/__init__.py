"""The page's routes: its files, from memory. It asks the API like any other client."""

from collections.abc import Mapping

from aiohttp import hdrs, web

from services.core.http.page_files import GUARDS, add_file


def add_page(app: web.Application, page: Mapping[str, bytes]) -> None:
    """Serve the page at / for browsers, and its files at /page/. Clients of Confluent's registry find an empty object at /.

    page: from `load_files`.
    """
    for name, content in page.items():
        if name != "index.html":
            add_file(app, f"/page/{name}", name, content)
    index = page["index.html"]

    async def root(request: web.Request) -> web.Response:
        if "text/html" in request.headers.get(hdrs.ACCEPT, ""):
            return web.Response(body=index, content_type="text/html", charset="utf-8", headers=GUARDS)
        return web.Response(body=b"{}", content_type="application/json")

    app.router.add_get("/", root)
