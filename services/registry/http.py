"""The registry over HTTP: who may ask for what, bodies, answers, and refusals in the form that a path's clients know."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
import structlog
from aiohttp import BasicAuth, web

from services.core import metrics
from services.core.avro.json_document import to_text
from services.core.http.address import LOOPBACK_NAMES, is_loopback_authority, is_named_authority
from services.core.http.problem_type import CONTENT_TYPE, problem_body
from services.core.security.keys import EVERY_STREAM, PREFIX, ApiKey, KeyRing
from services.registry import problems
from services.registry.catalog import Schema
from services.registry.entries import Damaged
from services.registry.objects import NotStored, StoreUnavailable
from services.registry.problems import CONFLUENT_CODES, Refused

log = structlog.get_logger()

CONFLUENT = "application/vnd.schemaregistry.v1+json"
MEDIA_TYPES = frozenset(
    {CONFLUENT, "application/vnd.schemaregistry+json", "application/json", "application/octet-stream"}
)
"""Of a body. Old clients send the last one."""
MAX_BODY_BYTES = 4 << 20
"""A schema of 1 MB, escaped inside of JSON."""
KEY = web.RequestKey("key", object)
RETRY_AFTER_S = 2
FOR_EVER = {"Cache-Control": "private, max-age=31536000, immutable"}
"""Of an answer by fingerprint, which never changes. Private: who gets it may depend on the key."""
_OWN = ("/v1/", "/openapi.json", "/page/")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_answer(body: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """For our own paths."""
    return web.Response(status=status, body=to_text(body).encode(), content_type="application/json", headers=headers)


def confluent_answer(body: object) -> web.Response:
    """For the paths of Confluent's registry."""
    return web.Response(body=to_text(body).encode(), content_type=CONFLUENT)


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object of the body. Raises Refused."""
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise Refused(problems.UNSUPPORTED_MEDIA_TYPE, "The body is compressed. Send it as it is.")
    if request.headers.get("Content-Type") is not None and request.content_type not in MEDIA_TYPES:
        raise Refused(problems.UNSUPPORTED_MEDIA_TYPE, f"Send Content-Type: {CONFLUENT} or application/json.")
    try:
        content = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise Refused(problems.BODY_TOO_LARGE, f"A body has at most {MAX_BODY_BYTES} bytes.") from None
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        detail = f"The body is not JSON: line {error.lineno}, column {error.colno}."
        raise Refused(problems.BAD_REQUEST, detail) from None
    if not isinstance(body, dict):
        raise Refused(problems.BAD_REQUEST, "The body is not a JSON object.")
    return body


def is_true(request: web.Request, name: str) -> bool:
    """A parameter of the query that is true or false."""
    return request.query.get(name, "false").lower() == "true"


def _render(request: web.Request, error: Refused) -> web.Response:
    kind, headers = error.kind, {}
    if kind.status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if request.path == "/" or request.path.startswith(_OWN):
        said: dict[str, object] = problem_body(kind, error.detail, **error.members)
        media = CONTENT_TYPE
    else:
        code = CONFLUENT_CODES.get(kind, kind.status)
        text = f"{kind.title}. {error.detail}"
        said = {"error_code": code, "message": text, "type": kind.uri, **error.members}
        media = CONFLUENT
    response = web.Response(status=kind.status, body=to_text(said).encode(), content_type=media, headers=headers)
    for scheme in ("Basic", "Bearer") if kind is problems.NO_VALID_KEY else ():
        response.headers.add("WWW-Authenticate", f'{scheme} realm="penstock"')
    return response


def _explain(request: web.Request, error: Exception) -> Refused:
    match error:
        case Refused():
            return error
        case NotStored():
            return Refused(problems.NOT_STORED, f"{error}.")
        case StoreUnavailable():
            return Refused(problems.STORE_UNAVAILABLE, f"{error}. The same request can be repeated.")
        case Damaged():
            return Refused(problems.STORE_DAMAGED, str(error))
        case web.HTTPMethodNotAllowed() if request.method == "DELETE":
            return Refused(problems.NOTHING_IS_DELETED, _DELETED)
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return Refused(problems.METHOD_NOT_ALLOWED, f"Allowed: {allowed}.")
        case web.HTTPNotFound():
            return Refused(problems.NOT_FOUND, "GET /openapi.json lists the resources.")
        case web.HTTPException():
            return Refused(problems.BAD_REQUEST._replace(status=error.status), error.reason)
    log.exception("request_failed", path=request.path)
    return Refused(problems.INTERNAL, "The reason is in the registry's log.")


_DELETED = (
    "Ids, versions and schemas stay for ever, because data may need them. Try: PATCH /v1/subjects/{subject}/versions/{version} "
    'with {"deprecated": true}; deprecated versions are not compared with new ones.'
)


@web.middleware
async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts each answer, and turns every error into a refusal."""
    try:
        response = await handler(request)
        response.headers.setdefault("X-Content-Type-Options", "nosniff")
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:  # the boundary: a fault of ours is logged once, counted, and answered
        refused = _explain(request, error)
        metrics.REGISTRY_REFUSED.labels(refused.kind.name).inc()
        response = _render(request, refused)
    metrics.REGISTRY_REQUESTS.labels(str(response.status)).inc()
    return response


class Access:
    """The keys of clients: every valid key reads, a key with the scope `manage` registers and sets levels. A key covers the
    subjects of its streams: `stream`, `stream-key`, `stream-value`, and `stream-TYPE` without another hyphen (which may belong to
    a stream with a longer name). Other subjects do not exist for it.

    ring: None: no key is needed, and only this machine may ask. names: of this server, beside its addresses.
    """

    def __init__(self, names: frozenset[str] = frozenset(), *, loopback: bool = True) -> None:
        self.ring: KeyRing | None = None
        self._names, self._loopback = names, loopback

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raises Refused for another host's name (DNS rebinding) and without a valid key."""
        self.check_host(request.url.raw_authority)
        if any(value.startswith(f"{PREFIX}_") for value in request.query.values()):
            raise Refused(problems.NO_VALID_KEY, "Proxies log URLs, so the key in this one must be revoked.")
        request[KEY] = self.authenticate(request.headers.getall("Authorization", []))
        return await handler(request)

    def check_host(self, asked: str) -> None:
        """Raises Refused."""
        if self._loopback and not is_loopback_authority(asked):
            raise Refused(problems.BAD_HOST, LOOPBACK_NAMES)
        if not self._loopback and not is_named_authority(asked, self._names):
            raise Refused(
                problems.BAD_HOST, "The registry answers to its addresses and to the names in its setting `names`."
            )

    def authenticate(self, given: list[str]) -> ApiKey | None:
        """The key of these headers; None when none is needed. Raises Refused."""
        if self.ring is None:
            return None
        key = self.ring.find(_token(given[0]) if len(given) == 1 else "")
        if key is None:
            raise Refused(problems.NO_VALID_KEY, "Send a key as Bearer, or as the password of Basic.")
        return key


def _token(header: str) -> str:
    scheme, _, rest = header.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    try:
        return str(BasicAuth.decode(header).password)
    except ValueError:
        return ""


def caller(request: web.Request) -> str:
    """The id of the client's key; empty where none is needed."""
    key = request.get(KEY)
    return key.id if isinstance(key, ApiKey) else ""


def covers(request: web.Request, subject: str) -> bool:
    """Whether the client may know this subject."""
    return _covers(request.get(KEY), subject)


def knows_schema(request: web.Request, schema: Schema) -> bool:
    """As `covers_schema`."""
    return covers_schema(request.get(KEY), schema)


def covers_schema(key: object, schema: Schema) -> bool:
    """Whether a key covers a subject that has this schema."""
    return not schema.uses or any(_covers(key, name) for name, _ in schema.uses)


def _covers(key: object, subject: str) -> bool:
    if not isinstance(key, ApiKey) or EVERY_STREAM in key.streams:
        return True
    return any(subject == stream or _is_of(subject, stream) for stream in key.streams)


def _is_of(subject: str, stream: str) -> bool:
    return subject.startswith(f"{stream}-") and "-" not in subject[len(stream) + 1 :]


def require_manage(request: web.Request, subject: str | None) -> None:
    """Raises Refused unless the client may change this subject; None: the defaults of all."""
    key = request.get(KEY)
    if not isinstance(key, ApiKey):
        return
    if "manage" not in key.scopes:
        raise Refused(problems.SCOPE_MISSING, "The key lacks the scope manage. Try: penstock keys create --manage")
    if subject is None and EVERY_STREAM not in key.streams:
        raise Refused(problems.SCOPE_MISSING, "Only a key for every stream may change the defaults of all subjects.")
    if subject is not None and not covers(request, subject):
        raise Refused(problems.SUBJECT_NOT_FOUND, "The key does not cover such a subject.")
