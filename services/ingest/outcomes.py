"""From what became of the records to what the client is told."""

import orjson
import structlog

from services.core.broker.errors import (
    BrokerClosed,
    BrokerError,
    OutcomeUnknown,
    RecordTooLarge,
    StorageFull,
    Throttled,
    UnknownTopic,
)
from services.core.broker.producer import SendResult
from services.core.problem_type import ProblemType, problem_json
from services.ingest import problems
from services.ingest.http_answer import PROBLEM, Answer, refuse, retry_later
from services.ingest.intake import Prepared
from services.ingest.problems import SEND_AGAIN, Refusal, Refused

log = structlog.get_logger()

RETRY_AFTER_S = 2.0
_KINDS: tuple[tuple[type[Exception], ProblemType, str], ...] = (
    (RecordTooLarge, problems.EVENT_TOO_LARGE, "It is larger than the broker takes."),
    (OutcomeUnknown, problems.OUTCOME_UNKNOWN, f"It may or may not be stored. {SEND_AGAIN}"),
    (StorageFull, problems.STORAGE_FULL, "It was not stored."),
    (Throttled, problems.STREAM_FULL, "It was not stored."),
    (UnknownTopic, problems.STREAM_NOT_READY, "The stream does not exist in the broker yet."),
    (BrokerClosed, problems.BROKER_UNAVAILABLE, "This process is stopping; it was not stored."),
    (BrokerError, problems.BROKER_UNAVAILABLE, "It was not stored."),
)


def explain(error: Exception) -> tuple[ProblemType, str]:
    """What a failed record's error means to a client. Anything unexpected leaves the outcome unknown."""
    for kind, problem, detail in _KINDS:
        if isinstance(error, kind):
            return problem, detail
    log.error("a send failed unexpectedly", kind=type(error).__name__, exc_info=error)
    return problems.OUTCOME_UNKNOWN, f"It may or may not be stored. {SEND_AGAIN}"


def find_failures(result: SendResult, prepared: Prepared) -> tuple[set[int], list[Refusal], float]:
    """Rows that were not stored for sure, why, and after how many seconds it may be worth trying again."""
    failed: set[int] = set()
    refusals: list[Refusal] = []
    retry_after = RETRY_AFTER_S
    known: dict[int, tuple[ProblemType, str]] = {}
    for part in result.parts:
        rows = prepared.rows[part.partition]
        for index, error in part.failed:
            if id(error) not in known:
                known[id(error)] = explain(error)
                if isinstance(error, Throttled) and error.retry_after is not None:
                    retry_after = max(retry_after, error.retry_after)
            failed.add(rows[index])
            refusals.append(Refusal(prepared.indexes[rows[index]], *known[id(error)]))
    return failed, refusals, retry_after


def answer(stored: int, refused: list[Refusal], retry_after: float, ids: list[str] | None) -> Answer:
    """200 when all were stored, 207 for some, 422 for none; 503 or 507 when none was and the broker is why, 429 its limits.

    retry_after: seconds, told when the broker is why any was refused.
    `ids`: those of the stored events, in the request's order, for clients that asked for them.
    """
    more = {} if ids is None else {"ids": ids}
    if not refused:
        body = orjson.dumps({"accepted": stored, **more}) if more else b'{"accepted":%d}' % stored
        return Answer(200, body)
    refused = sorted(refused, key=lambda refusal: refusal.index)
    listed = [refusal.as_json() for refusal in refused]
    ours = [refusal.kind for refusal in refused if refusal.kind.status >= 503 or refusal.kind is problems.STREAM_FULL]
    if stored:
        later = retry_later(retry_after) if ours else {}
        return Answer(207, orjson.dumps({"accepted": stored, "refused": listed, **more}), headers=later)
    if ours:
        return _unavailable(ours, retry_after)
    detail = f"All {len(refused)} events were refused."
    return Answer(422, problem_json(problems.NOTHING_ACCEPTED, detail, accepted=0, refused=listed), PROBLEM)


def _unavailable(kinds: list[ProblemType], retry_after: float) -> Answer:
    """None was stored for sure: one answer for the whole request. An unknown outcome outweighs the others."""
    kind = problems.OUTCOME_UNKNOWN if problems.OUTCOME_UNKNOWN in kinds else kinds[0]
    outcome = "unknown" if kind is problems.OUTCOME_UNKNOWN else "not stored"
    return refuse(Refused(kind, SEND_AGAIN, retry_after=retry_after), outcome=outcome)
