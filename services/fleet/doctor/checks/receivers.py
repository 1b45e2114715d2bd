"""Checks of the destinations: files of secrets, receivers that refuse or do not answer, pauses."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from services.core.control.pauses import GONE, Pause
from services.core.pipe_file.topic_names import lane_name, retry_topic
from services.core.times import format_time
from services.core.units import format_count
from services.fleet.doctor.checks.counters import format_span
from services.fleet.doctor.checks.expiry import find_expired, find_expired_tokens, said_to_end
from services.fleet.doctor.diagnosis import Finding, about
from services.fleet.doctor.facts import Endpoint, Facts, LogLine

STALE_S = 30.0
"""Services read files of secrets every second. Content that is older than this could not be loaded."""
FORGOTTEN_S = 2 * 86400.0
_AGES = {
    "penstock_ingest_keys_age_seconds": "the API keys of ingest",
    "penstock_signing_keys_age_seconds": "a signing secret",
    "penstock_credentials_age_seconds": "a credential",
    "penstock_observer_tokens_age_seconds": "the observer's tokens",
    "penstock_table_keys_age_seconds": "the API keys of the table service",
}
_DELIVERED = "delivered"
_GRANTED = "ok"
_UNREACHABLE = {"connection", "dns", "timeout", "tls"}
"""Reasons that are no answer."""


def find_secrets(facts: Facts) -> Iterator[Finding]:
    """Files of secrets that cannot be used: wrong mode, missing, damaged."""
    for fault in facts.files:
        yield Finding(
            f"{fault.what[0].upper()}{fault.what[1:]} cannot be used.",
            [fault.problem],
            f"chmod 600 {fault.path}   # its owner alone may read it"
            if "chmod" in fault.problem
            else f"ls -la {fault.path}   # put its last good content back; it is read again within seconds",
            fault.about,
            runbook="PenstockIngestKeysStale" if "ingest" in fault.about else "",
        )
    known = {part for fault in facts.files for part in fault.about}
    for metric, what in _AGES.items():
        for one, labels, value, _ in facts.series(metric):
            name = labels.get("name", one.service)
            if value > STALE_S and not {name, one.service} & known:
                yield Finding(
                    f"{one.name} cannot load {what}{f' of {name}' if 'name' in labels else ''} and uses the old content.",
                    [f"for {value:.0f} s ({metric})", *_lines(facts, one.name, ("file_unusable", "file_stale"))],
                    f"grep file_ {one.log}" if one.log is not None else f"the log of {one.name}: file_unusable",
                    about(name),
                    runbook="PenstockIngestKeysStale" if one.service == "ingest" else "",
                )


def find_refused_tokens(facts: Facts) -> Iterator[Finding]:
    """Destinations whose token server gives no token. It is asked ever more seldom, so most collections see no request: then the
    last word of the log counts, or that no token was ever given to this process."""
    counts: defaultdict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for _, labels, value, grown in facts.series("penstock_expel_token_requests_total"):
        words = counts[lane_name(labels["pipe"], labels["destination"])]
        total, before = words.get(labels["outcome"], (0.0, 0.0))
        words[labels["outcome"]] = total + value, before + grown
    for lane, words in counts.items():
        granted, granted_now = words.pop(_GRANTED, (0.0, 0.0))
        failed = {word: total for word, (total, _) in words.items() if total}
        last = _newest(facts, lane, ("token_server_failed", "token_server_answers_again"))
        is_failing = last is not None and last.event == "token_server_failed"
        if not failed or granted_now or lane in facts.broker.pauses:
            continue
        if granted and not is_failing and not any(grown for _, grown in words.values()):
            continue
        named = ", ".join(f"{word} {total:.0f}" for word, total in sorted(failed.items()))
        said = f": {last.fields.get('detail')}" if last is not None and is_failing else ""
        is_down = failed.keys() <= _UNREACHABLE or all(word.startswith("http_5") for word in failed)
        yield Finding(
            f"The token server of {lane} gives no token; without one its events wait.",
            [
                f"failed requests for a token: {named}",
                *said_to_end(facts, lane),
                *([f"expel's log{said}"[:400]] if said else []),
            ],
            f"ask the owner of the token server of {lane} whether it runs"
            if is_down
            else f"put the present client secret of {lane} into its file (auth.oauth.client_secret); no restart is needed",
            about(lane),
        )


def find_every(facts: Facts) -> Iterator[Finding]:
    """Every destination that has had requests fails, and nothing else explains it: more likely our network than all of theirs."""
    found = {lane: counts for lane, counts in _attempts(facts).items() if any(counts[1].values())}
    endpoints = {lane: one for one in facts.endpoints for lane in one.lanes}
    lanes = sorted(found.keys() - facts.broker.pauses.keys())
    explained = {part for fault in facts.files for part in fault.about}
    explained |= {
        part for find in (find_expired, find_expired_tokens) for finding in find(facts) for part in finding.about
    }
    explained |= {part for finding in find_refused_tokens(facts) for part in finding.about}
    if len(lanes) < 2 or explained & set(lanes):
        return
    reasons: dict[str, str] = {}
    for lane in lanes:
        grown, total = found[lane]
        failed = {word: count for word, count in grown.items() if word != _DELIVERED and count}
        is_open = _breaker(facts, lane)
        if not (is_open or (failed and not grown.get(_DELIVERED))):
            return
        if is_open and _is_recovering(facts, lane, failed, endpoints.get(lane)):
            return
        words = failed or {word: count for word, count in total.items() if word != _DELIVERED and count}
        reasons[lane] = str(_said(facts, lane).get("reason") or max(words, key=lambda word: words[word], default="?"))
    hosts = [endpoint.url for lane in lanes if (endpoint := endpoints.get(lane)) is not None]
    yield Finding(
        f"No destination accepts events: all {len(lanes)} with requests fail.",
        [f"{lane}: {reason}" for lane, reason in reasons.items()],
        _first_of_every(set(reasons.values()), hosts[0] if hosts else "its URL"),
        about(*lanes),
    )


def _first_of_every(reasons: set[str], url: str) -> str:
    if all(reason.startswith("http_") for reason in reasons):
        return "they answer, so our network works: what do they share? Ask their owners"
    if "dns" in reasons:
        return f"getent hosts {url.partition('://')[2].partition(':')[0]}   # the name server of expel's machine"
    if reasons == {"tls"}:
        return "timedatectl   # on expel's machine; then its certificates (ca-certificates)"
    return f"curl -sv {url} -o /dev/null   # on expel's machine: firewall, proxy, NAT gateway, routes"


def find_failing(facts: Facts) -> Iterator[Finding]:
    """Destinations whose requests fail: an open circuit breaker, or only failures between the two readings."""
    endpoints = {lane: one for one in facts.endpoints for lane in one.lanes}
    found = _attempts(facts)
    for lane in sorted(found.keys() | endpoints.keys()):
        grown, total = found.get(lane, ({}, {}))
        endpoint = endpoints.get(lane)
        is_open = _breaker(facts, lane)
        failed = {word: count for word, count in grown.items() if word != _DELIVERED and count}
        is_failing = bool(failed) and not grown.get(_DELIVERED)
        is_unreachable = endpoint is not None and bool(endpoint.problem) and facts.state is not None
        if not (is_open or is_failing or is_unreachable) or lane in facts.broker.pauses:
            continue
        if is_open and endpoint is not None and _is_recovering(facts, lane, failed, endpoint):
            yield _recovering(lane, endpoint, facts)
            continue
        words = failed or {word: count for word, count in total.items() if word != _DELIVERED and count}
        said = _said(facts, lane)
        reason = said.get("reason") or max(words, key=lambda word: words[word], default="")
        yield Finding(
            _what(lane, str(reason), endpoint),
            list(_evidence(facts, lane, words, str(said.get("detail", "")), endpoint, is_open=is_open)),
            _first(lane, str(reason), endpoint),
            about(lane),
            runbook="" if is_open else "PenstockLagGrows",
        )


def _is_recovering(facts: Facts, lane: str, failed: Mapping[str, float], endpoint: Endpoint | None) -> bool:
    """Whether the receiver of an open circuit breaker accepts connections again, and no request was due since.

    Not when the last failure was an answer, a late one, or no trusted connection: a connection that succeeds says nothing about
    these.
    """
    reason = str(_said(facts, lane).get("reason", ""))
    is_back = endpoint is not None and not endpoint.problem and not failed
    return is_back and (not reason or reason in ("connection", "dns"))


def _recovering(lane: str, endpoint: Endpoint, facts: Facts) -> Finding:
    """A receiver that accepts connections again, before the next request to it."""
    due = [value for _, _, value, _ in facts.series("penstock_retrier_next_due_timestamp_seconds") if value > 0]
    evidence = [
        f"a connection from this machine to {endpoint.url}: succeeds",
        "its circuit breaker is open until a request succeeds, and no request was due since",
    ]
    if due and min(due) > facts.now:
        evidence.append(f"the next event with the global retrier is due in {min(due) - facts.now:.0f} s")
    what = f"The receiver of {lane} was down and accepts connections again. The next event that is due tests it."
    return Finding(what, evidence, "penstock status --watch   # nothing to do", about(lane), is_note=True)


def _attempts(facts: Facts) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    """By lane: the attempts by outcome between the readings, and in all."""
    found: defaultdict[str, tuple[dict[str, float], dict[str, float]]] = defaultdict(lambda: ({}, {}))
    for _, labels, value, grown in facts.series("penstock_expel_attempts_total"):
        recent, total = found[f"{labels['pipe']}/{labels['destination']}"]
        recent[labels["outcome"]] = recent.get(labels["outcome"], 0.0) + grown
        total[labels["outcome"]] = total.get(labels["outcome"], 0.0) + value
    return dict(found)


def _breaker(facts: Facts, lane: str) -> bool:
    pipe, _, destination = lane.partition("/")
    series = facts.series("penstock_expel_breaker_state", pipe=pipe, destination=destination)
    return any(value > 0 for _, _, value, _ in series)


def _said(facts: Facts, lane: str) -> dict[str, object]:
    """The newest line in expel's log about the lane's failures."""
    line = _newest(facts, lane, ("breaker_open",))
    return dict(line.fields) if line is not None else {}


def _newest(facts: Facts, lane: str, events: tuple[str, ...]) -> LogLine | None:
    """The newest line with one of these events about a lane, in the logs of expel."""
    lines = [
        line
        for one in facts.of("expel")
        for line in one.lines
        if line.event in events and line.fields.get("lane") == lane
    ]
    return max(lines, key=lambda line: line.at, default=None)


def _what(lane: str, reason: str, endpoint: Endpoint | None) -> str:
    if reason == "http_429":
        return f"The receiver of {lane} throttles us (429): it accepts fewer events than arrive."
    if reason in ("http_401", "http_403"):
        return f"The receiver of {lane} refuses our credential ({reason.removeprefix('http_')})."
    if reason == "tls":
        return f"No trusted TLS connection to the receiver of {lane}."
    if endpoint is not None and endpoint.problem:
        return f"The receiver of {lane} is down: {endpoint.problem}."
    if reason == "timeout":
        return f"The receiver of {lane} does not answer in time."
    if reason.startswith("http_"):
        return f"The receiver of {lane} answers {reason.removeprefix('http_')}."
    return f"The receiver of {lane} does not accept events{f' ({reason})' if reason else ''}."


def _evidence(
    facts: Facts, lane: str, words: dict[str, float], detail: str, endpoint: Endpoint | None, *, is_open: bool
) -> Iterator[str]:
    if is_open:
        yield "its circuit breaker is open: almost every request failed"
    if words:
        yield "failed attempts: " + ", ".join(f"{word} {count:.0f}" for word, count in sorted(words.items()))
    if detail:
        yield f"expel's log: {detail[:300]}"
    if endpoint is not None:
        yield f"a connection from this machine to {endpoint.url}: {endpoint.problem or 'succeeds'}"
    pipe, _, destination = lane.partition("/")
    behind = sum(
        lag.records
        for (group, topic), lags in facts.broker.lags.items()
        if group == f"{pipe}.{destination}" and topic != retry_topic(pipe)
        for lag in lags.values()
    )
    if behind:
        others = "beside those that wait for a later round (penstock status)"
        yield f"{format_count(behind, 'event')} not settled, {others}; none is lost"


def _first(lane: str, reason: str, endpoint: Endpoint | None) -> str:
    if reason in ("http_401", "http_403"):
        return f"compare the secret of {lane} with its receiver's; a corrected file needs no restart"
    if reason == "http_429":
        return f"ask the owner of the receiver for its limit, and set `rate` of {lane} to that in the pipe file"
    if reason.startswith("http_"):
        return f"ask the owner of the receiver of {lane}: its log has the cause of the {reason.removeprefix('http_')}"
    url = "its URL" if endpoint is None else endpoint.url
    return f"curl -sv {url} -o /dev/null   # then ask the owner of the receiver of {lane}"


def find_gone(facts: Facts) -> Iterator[Finding]:
    """Destinations that answered 410, and were paused by that."""
    for name, pause in facts.broker.pauses.items():
        if pause.reason == GONE:
            yield Finding(
                f"The receiver of {name} answered 410 and wants no more events, so the destination is paused.",
                [_since(pause), "its events are parked and kept"],
                f"penstock destination resume {name}   # when its owner has corrected that",
                about(name),
            )


def find_paused(facts: Facts) -> Iterator[Finding]:
    """Pauses of operators: forgotten after two days."""
    for name, pause in facts.broker.pauses.items():
        if pause.reason == GONE:
            continue
        is_forgotten = facts.now - pause.at / 1000 > FORGOTTEN_S
        pipe, _, destination = name.partition("/")
        parts = about(name) if destination else about(f"pipe {pipe}", "transform")
        yield Finding(
            f"{name} has been paused for {format_span(facts.now - pause.at / 1000)}, by {pause.by}.",
            [_since(pause)],
            f"penstock destination resume {destination} --pipe {pipe}" if destination else f"penstock resume {pipe}",
            parts,
            runbook="" if destination else "PenstockTransformPaused",
            is_note=not is_forgotten,
        )


def _since(pause: Pause) -> str:
    return f"since {format_time(pause.at)} by {pause.by} because: {pause.because}"


def _lines(facts: Facts, name: str, events: tuple[str, ...]) -> list[str]:
    """The newest lines of these events in the log of an instance."""
    lines = [line.text for one in facts.instances if one.name == name for line in one.lines if line.event in events]
    return lines[-1:]
