"""All reasons for which the table service refuses a request: RFC 9457 problem types, stable for clients (docs/tables.md)."""

from services.core.http.problem_type import ProblemType

BAD_REQUEST = ProblemType("bad-request", 400, "The HTTP request is malformed")
BAD_PARAMETER = ProblemType("bad-parameter", 400, "A parameter is not understood")
BAD_KEY = ProblemType("bad-key", 400, "The key in the path is not valid")
NO_VALID_KEY = ProblemType("no-valid-key", 401, "The request has no valid API key")
KEY_IN_URL = ProblemType("key-in-url", 401, "The URL has an API key")
SCOPE_MISSING = ProblemType("scope-missing", 403, "The API key lacks a scope")
NOT_FOUND = ProblemType("not-found", 404, "There is no such resource")
TABLE_NOT_FOUND = ProblemType("table-not-found", 404, "There is no such table")
KEY_NOT_FOUND = ProblemType("key-not-found", 404, "The table has no such key")
METHOD_NOT_ALLOWED = ProblemType("method-not-allowed", 405, "This method is not allowed here")
TOKEN_GONE = ProblemType("token-gone", 410, "The stream of the token was deleted")
TOKEN_UNKNOWN = ProblemType("token-unknown", 412, "The stream has no such offset")
TOKEN_EXPIRED = ProblemType("token-expired", 412, "The changes since the token are not all known")
BAD_HOST = ProblemType("bad-host", 421, "The table service does not answer to this host name")
HEAD_TOO_LARGE = ProblemType("head-too-large", 431, "The head of the request is too large")
INTERNAL = ProblemType("internal", 500, "The table service failed")
NOT_READY = ProblemType("not-ready", 503, "The table does not have the newest events of its stream")
NOT_REACHED = ProblemType("not-reached", 503, "The table has not reached the token")
BUSY = ProblemType("busy", 503, "Too many clients wait")

ALL = tuple(value for value in list(globals().values()) if isinstance(value, ProblemType))


class Refused(Exception):
    """The answer to the request is this problem. retry_after: seconds. ends: the connection ends."""

    def __init__(
        self,
        kind: ProblemType,
        detail: str,
        *,
        retry_after: int | None = None,
        allow: str | None = None,
        ends: bool = False,
    ) -> None:
        super().__init__(detail)
        self.kind, self.detail, self.retry_after, self.allow, self.ends = kind, detail, retry_after, allow, ends
