"""Checks of what has a date: certificates, ours and the receivers', tokens of ours that tell their end, secrets with a note."""

from collections.abc import Iterator

from services.core.security.kafka import NAME as KAFKA
from services.core.times import format_time
from services.fleet.doctor.checks.counters import format_span
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


OLD_DAYS = 400.0
"""A secret without a date that was not changed for so long is worth a word."""


def find_expiring_secrets(facts: Facts) -> Iterator[Finding]:
    """API keys, signing secrets and others that end by the date beside them, soon or before now."""
    written = _written(facts)
    for (name, key), until in sorted(_ends_of_secrets(facts).items()):
        left, soon = until - facts.now, SOON_DAYS * 86400
        if name in _WITH_KEYS and (name, key) in written:
            soon = min(soon, LAST_SHARE * (until - written[name, key]))
        if left <= soon:
            ends = f"expires in {format_span(left)}" if left > 0 else f"expired {format_span(-left)} ago, by its date"
            yield _secret_ends(name, key, until, ends)


def find_old_secrets(facts: Facts) -> Iterator[Finding]:
    """Secrets without a date that nobody has changed for a long time."""
    ends = _ends_of_secrets(facts)
    for (name, key), written in sorted(_written(facts).items()):
        if (name, key) not in ends and facts.now - written > OLD_DAYS * 86400:
            yield Finding(
                f"{_capital(_secret(name, key))} was not changed for {format_span(facts.now - written)}, and has no date.",
                [f"its file was written at {format_time(int(written * 1000))}"],
                "ask its owner when it expires, and write a line `# expires: 2027-01-31` into its file",
                about(name),
                is_note=True,
            )


def said_to_end(facts: Facts, lane: str) -> list[str]:
    """Evidence: secrets of a lane whose date has passed."""
    return [
        f"{_secret(name, key)} expired {format_span(facts.now - until)} ago, by the date in its file"
        for (name, key), until in sorted(_ends_of_secrets(facts).items())
        if name == lane and until <= facts.now
    ]


_WITH_KEYS = ("ingest", "registry", "table")
"""Services that show the ends of API keys."""


def _secret(name: str, key: str) -> str:
    return f"the API key {key}" if name in _WITH_KEYS else f"the secret of {name} ({key})"


def _secret_ends(name: str, key: str, until: float, ends: str) -> Finding:
    if name in _WITH_KEYS:
        what, first = "expires", f"penstock keys create …   # for the owner of {key} in `penstock keys list`, in time"
    else:
        what = "# expires"
        first = f"put a new secret and its date into the file of {name} ({key}); no restart is needed, except for a variable"
    evidence = [f"valid until {format_time(int(until * 1000))} ({what})"]
    return Finding(f"{_capital(_secret(name, key))} {ends}.", evidence, first, about(name))


def _ends_of_secrets(facts: Facts) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for _, labels, until, _ in facts.series("penstock_secret_expiry_timestamp_seconds"):
        place = labels["name"], labels["key"]
        found[place] = min(until, found.get(place, until))
    return found


def _written(facts: Facts) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for _, labels, value, _ in facts.series("penstock_secret_written_timestamp_seconds"):
        place = labels["name"], labels["key"]
        found[place] = max(value, found.get(place, value))
    return found
