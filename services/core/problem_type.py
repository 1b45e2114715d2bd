"""Problem details (RFC 9457), as every HTTP API of ours answers when it says no."""

from typing import NamedTuple

import orjson

URN = "urn:penstock:problem:"
CONTENT_TYPE = "application/problem+json"


class ProblemType(NamedTuple):
    """One kind of problem. `name` is the stable end of its URI; `status` is what a whole request of this kind gets."""

    name: str
    status: int
    title: str

    @property
    def uri(self) -> str:
        """The `type` member of RFC 9457."""
        return URN + self.name


def problem_json(kind: ProblemType, detail: str, **members: object) -> bytes:
    """The body of an application/problem+json answer."""
    head = {"type": kind.uri, "title": kind.title, "status": kind.status, "detail": detail}
    return orjson.dumps({**head, **members})
