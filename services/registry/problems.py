"""All reasons for which the registry refuses a request: RFC 9457 types for our own paths, error codes for the Confluent ones.

A path that Confluent's registry has answers `{"error_code", "message"}` with that registry's codes, because existing clients read
them. Every other path answers `application/problem+json`.
"""

from collections.abc import Mapping

from services.core.http.problem_type import ProblemType

BAD_REQUEST = ProblemType("bad-request", 400, "The request is malformed")
BAD_PARAMETER = ProblemType("bad-parameter", 400, "A parameter is not valid")
BAD_NAME = ProblemType("bad-name", 400, "A subject's name is not valid")
NO_VALID_KEY = ProblemType("no-valid-key", 401, "The request has no valid API key")
SCOPE_MISSING = ProblemType("scope-missing", 403, "The API key lacks a scope")
NOT_FOUND = ProblemType("not-found", 404, "There is no such resource")
SUBJECT_NOT_FOUND = ProblemType("subject-not-found", 404, "There is no such subject")
VERSION_NOT_FOUND = ProblemType("version-not-found", 404, "The subject has no such version")
SCHEMA_NOT_FOUND = ProblemType("schema-not-found", 404, "There is no such schema")
LEVEL_NOT_SET = ProblemType("level-not-set", 404, "The subject has no compatibility level of its own")
MODE_NOT_SET = ProblemType("mode-not-set", 404, "The subject has no mode of its own")
PROTOCOL_NOT_FOUND = ProblemType("protocol-not-found", 404, "There is no such protocol")
METHOD_NOT_ALLOWED = ProblemType("method-not-allowed", 405, "This method is not allowed here")
NOTHING_IS_DELETED = ProblemType("nothing-is-deleted", 405, "The registry deletes nothing")
INCOMPATIBLE = ProblemType("incompatible", 409, "The schema is incompatible with an earlier version")
BODY_TOO_LARGE = ProblemType("body-too-large", 413, "The body is too large")
UNSUPPORTED_MEDIA_TYPE = ProblemType(
    "unsupported-media-type", 415, "This Content-Type or Content-Encoding is not supported"
)
BAD_HOST = ProblemType("bad-host", 421, "The registry does not answer to this host name")
BAD_SCHEMA = ProblemType("bad-schema", 422, "The schema is not valid")
BAD_REFERENCE = ProblemType("bad-reference", 422, "A reference names no version of a subject")
BAD_VERSION = ProblemType("bad-version", 422, "A version is not valid")
BAD_LEVEL = ProblemType("bad-level", 422, "A compatibility level is not valid")
BAD_MODE = ProblemType("bad-mode", 422, "A mode is not valid")
NOT_PERMITTED = ProblemType("not-permitted", 422, "The registry does not allow this")
INTERNAL = ProblemType("internal", 500, "The registry failed; the outcome is unknown")
STORE_UNAVAILABLE = ProblemType("store-unavailable", 503, "The store does not answer; the outcome is unknown")
NOT_STORED = ProblemType("not-stored", 503, "The store refused; nothing was stored")
BUSY = ProblemType("busy", 503, "Too many requests wait; nothing was stored")
STORE_DAMAGED = ProblemType("store-damaged", 503, "A stored object was altered")

ALL = tuple(value for value in list(globals().values()) if isinstance(value, ProblemType))

CONFLUENT_CODES: Mapping[ProblemType, int] = {
    SUBJECT_NOT_FOUND: 40401,
    VERSION_NOT_FOUND: 40402,
    SCHEMA_NOT_FOUND: 40403,
    LEVEL_NOT_SET: 40408,
    MODE_NOT_SET: 40409,
    BAD_SCHEMA: 42201,
    BAD_REFERENCE: 42201,
    BAD_VERSION: 42202,
    BAD_LEVEL: 42203,
    BAD_MODE: 42204,
    NOT_PERMITTED: 42205,
    INTERNAL: 50001,
    STORE_UNAVAILABLE: 50001,
    NOT_STORED: 50001,
    BUSY: 50001,
    STORE_DAMAGED: 50001,
}
"""Every other problem has its status as its code."""


class Refused(Exception):
    """The answer to the request is this problem. members: more members of the body, e.g. the differences."""

    def __init__(self, kind: ProblemType, detail: str, **members: object) -> None:
        super().__init__(detail)
        self.kind, self.detail, self.members = kind, detail, members
