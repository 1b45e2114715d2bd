"""Checks of what has a date: certificates, ours and the receivers', and tokens of ours that tell their end."""

from collections.abc import Iterator

from services.core.kafka_security import NAME as KAFKA
from services.core.times import format_time
from services.fleet.doctor.diagnosis import Finding, about
from services.fleet.doctor.facts import Certificate, Facts

SOON_DAYS = 21.0
LAST_SHARE = 0.1
"""Of the life of a token. It expires soon when less than that is left, and less than SOON_DAYS: as the alert says."""


def find_expired_login(facts: Facts) -> Iterator[Finding]:
    """Certificates for the way to Kafka that have ended. Open connections go on; no new one is accepted."""
    yield from _find_ended(facts, [one for one in _certificates(facts) if not one.lanes])


def find_expired(facts: Facts) -> Iterator[Finding]:
    """Certificates for receivers that have ended: theirs, and our own."""
    yield from _find_ended(facts, [one for one in _certificates(facts) if one.lanes])


def _find_ended(facts: Facts, certificates: list[Certificate]) -> Iterator[Finding]:
    for one in certificates:
        if one.until <= facts.now:
            yield _expiry(one, f"{_capital(one.whose)} expired {format_span(facts.now - one.until)} ago.")


def find_expiring(facts: Facts) -> Iterator[Finding]:
    """Certificates that end within SOON_DAYS."""
    for one in _certificates(facts):
        if facts.now < one.until <= facts.now + SOON_DAYS * 86400:
            yield _expiry(one, f"{_capital(one.whose)} expires in {format_span(one.until - facts.now)}.")


def _certificates(facts: Facts) -> list[Certificate]:
    found = [*facts.certificates, *(one.certificate for one in facts.endpoints if one.certificate is not None)]
    if facts.data is not None:
        return found
    shown = facts.series("penstock_certificate_expiry_timestamp_seconds")  # of files on the services' machines
    ends = {(labels["name"], labels["key"]): until for _, labels, until, _ in shown}
    return found + [_shown(name, key, until) for (name, key), until in ends.items()]


def _shown(name: str, key: str, until: float) -> Certificate:
    """As the metric has it."""
    lanes, file = ((), "file of ?security=") if name == KAFKA else ((name,), "pipe file")
    return Certificate(f"the certificate of {name} ({key})", until, lanes, place=f"{key} in the {file}")


def _expiry(one: Certificate, what: str) -> Finding:
    users = ", ".join(one.lanes) or "every connection to Kafka: open ones go on, and no new one is accepted"
    evidence = [f"valid until {format_time(int(one.until * 1000))}", f"used by {users}"]
    if one.path is not None:
        first = f"openssl x509 -in {one.path} -noout -dates   # then put a new one there; no restart is needed"
    elif one.place:
        first = f"put a new certificate into the file that {one.place} names; no restart is needed"
    else:
        first = f"ask the owner of the receiver to renew it ({', '.join(one.lanes)})"
    return Finding(what, evidence, first, about(*one.lanes))


def format_span(seconds: float) -> str:
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 86400:.0f} days" if seconds >= 2 * 86400 else f"{seconds / 3600:.0f} hours"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def find_expired_tokens(facts: Facts) -> Iterator[Finding]:
    """Tokens that have ended: the receiver answers 401."""
    for lane, key, _, until in _tokens(facts):
        if until <= facts.now:
            yield _token_ends(lane, key, until, f"expired {format_span(facts.now - until)} ago.")


def find_expiring_tokens(facts: Facts) -> Iterator[Finding]:
    """Tokens that end soon."""
    for lane, key, issued, until in _tokens(facts):
        if facts.now < until <= facts.now + min(SOON_DAYS * 86400, LAST_SHARE * (until - issued)):
            yield _token_ends(lane, key, until, f"expires in {format_span(until - facts.now)}.")


def _tokens(facts: Facts) -> Iterator[tuple[str, str, float, float]]:
    """Lane, key in the pipe file, issue and end, as expel shows them: it alone knows the values of variables."""
    issued = {
        (one.name, labels["name"], labels["key"]): value
        for one, labels, value, _ in facts.series("penstock_token_issued_timestamp_seconds")
    }
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for one, labels, until, _ in facts.series("penstock_token_expiry_timestamp_seconds"):
        lane, key = labels["name"], labels["key"]
        began = issued.get((one.name, lane, key), until)
        before = found.get((lane, key), (began, until))
        found[lane, key] = min(before[0], began), min(before[1], until)
    for (lane, key), (began, until) in sorted(found.items()):
        yield lane, key, began, until


def _token_ends(lane: str, key: str, until: float, what: str) -> Finding:
    return Finding(
        f"The token of {lane} ({key}) {what}",
        [f"valid until {format_time(int(until * 1000))} (exp)"],
        f"put a new token of {lane} into its file ({key} in the pipe file); no restart is needed, except for a variable",
        about(lane),
    )
