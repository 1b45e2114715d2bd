"""Problem details (RFC 9457): the bodies of all refusals by our HTTP APIs."""

from typing import NamedTuple

import orjson

URN = "urn:penstock:problem:"
CONTENT_TYPE = "application/problem+json"


class ProblemType(NamedTuple):
    """One kind of problem. name: the stable end of its URI. status: of a request that is refused as a whole."""

    name: str
    status: int
    title: str

    @property
    def uri(self) -> str:
        """The `type` member of RFC 9457."""
        return URN + self.name


def problem_json(kind: ProblemType, detail: str, **members: object) -> bytes:
    """The body of an application/problem+json answer."""
    return orjson.dumps(problem_body(kind, detail, **members))


def problem_body(kind: ProblemType, detail: str, **members: object) -> dict[str, object]:
    """The same, not yet as JSON."""
    return {"type": kind.uri, "title": kind.title, "status": kind.status, "detail": detail, **members}
