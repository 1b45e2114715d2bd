"""How the observer's API reads a query and answers: JSON, or a problem (RFC 9457)."""

from collections.abc import Awaitable, Callable, Mapping

import orjson
import structlog
from aiohttp import web

from services.core import metrics
from services.core.address import LOOPBACK_NAMES, is_loopback_authority
from services.core.problem_type import CONTENT_TYPE, ProblemType, problem_json
from services.observer import problems

log = structlog.get_logger()

_MAX_PARAMETER = 40


class Refused(Exception):
    """The request gets this problem."""

    def __init__(self, kind: ProblemType, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.detail = kind, detail


def read_query(request: web.Request, known: Mapping[str, Callable[[str], int]]) -> dict[str, int]:
    """Each parameter at most once, and no other than the known ones. Raises Refused."""
    found: dict[str, int] = {}
    for name, text in request.query.items():
        if name not in known or name in found or len(text) > _MAX_PARAMETER:
            allowed = f"Known here, each at most once: {', '.join(known) or 'none'}."
            raise Refused(problems.BAD_PARAMETER, allowed)
        found[name] = known[name](text)
    return found


def json_answer(body: object, *, status: int = 200) -> web.Response:
    """An answer."""
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")


def _problem(kind: ProblemType, detail: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=kind.status, body=problem_json(kind, detail), content_type=CONTENT_TYPE, headers=headers)


@web.middleware
async def answer(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Counts each answer, and makes a problem of whatever is none."""
    try:
        response = await handler(request)
    except Refused as error:
        response = _problem(error.kind, error.detail)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        response = _problem(problems.METHOD_NOT_ALLOWED, f"Allowed: {allowed}.", {"Allow": allowed})
    except web.HTTPNotFound:
        response = _problem(problems.NOT_FOUND, "GET /openapi.json says what there is.")
    except web.HTTPException as error:
        response = _problem(problems.BAD_REQUEST._replace(status=error.status), error.reason)
    except Exception:
        log.exception("request_failed", path=request.path)
        response = _problem(problems.INTERNAL, "Its log says why.")
    metrics.OBSERVER_REQUESTS.labels(str(response.status)).inc()
    return response


@web.middleware
async def refuse_other_names(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """421 for a request to another name; see `is_loopback_authority`."""
    if not is_loopback_authority(request.url.raw_authority):
        raise Refused(problems.BAD_HOST, LOOPBACK_NAMES)
    return await handler(request)
