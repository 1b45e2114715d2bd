"""Checks of the processes: dead, hung, dying again and again, missing, with a wrong configuration or another version."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from services.core.process.expected import list_expected
from services.core.units import format_count
from services.fleet.doctor.checks import transforms
from services.fleet.doctor.checks.counters import log_command
from services.fleet.doctor.checks.transforms import STARTING
from services.fleet.doctor.diagnosis import Finding, about
from services.fleet.doctor.facts import Facts, Instance, LogLine

FLOW = ("ingest", "transform", "expel", "retrier", "table", "observer", "registry", "autoscaler")
"""The services in the order of their importance for events."""
MANY_RESTARTS = 3
YOUNG_S = 30.0
"""The supervisor waits at most so long before it starts a process again."""
LISTENS_WITHIN_S = 90.0
"""A process may take so long to open its management port; Spark does."""
LOOKED_BACK_S = 600.0
SHOWN_LINES = 3
_STARTED = ("started", "management_port_open")
"""The first event in the log of each run."""
_CORRECT = "penstock check   # then correct the file, or go back to the last good one, and start penstock up"
_SAFE = "acknowledged events are stored; unfinished ones are processed again"


def find_no_fleet(facts: Facts) -> Iterator[Finding]:
    """No supervisor runs: the fleet was stopped, or its supervisor died, and the services with it."""
    if facts.stopped:
        path = "pipes.yaml" if facts.pipes_path is None else str(facts.pipes_path)
        yield Finding(
            f"No fleet runs on {facts.data}: it was stopped in good order, or never started.",
            ["there is no fleet.json, which a running fleet keeps"],
            f"penstock up -f {path} --data {facts.data}   # with the options of its last start",
        )
    elif facts.state is not None and facts.has_ended:
        alive = sum(one.status not in ("gone", "zombie", "") for one in facts.instances)
        yield Finding(
            f"The supervisor (penstock up) is dead, and {'most' if alive else 'all'} services ended with it.",
            [f"process {facts.state.pid} of {facts.data}/fleet.json does not exist", _SAFE],
            f"penstock up --data {facts.data} --listen {facts.state.listen}   # with the options of its last start",
        )


def find_hung_supervisor(facts: Facts) -> Iterator[Finding]:
    """The services continue without it, but nobody starts them again."""
    one = facts.supervisor
    if one is not None and one.answer == "silent":
        yield Finding(
            f"The supervisor (penstock up) {_how_hung(one)}; a service that dies now is not started again.",
            [f"process {one.pid}, http://{one.address}/readyz: {one.reason}"],
            _wake(one) if one.status == "stopped" else f"py-spy dump --pid {one.pid}   # then restart penstock up",
            about("supervisor"),
        )


def find_versions(facts: Facts) -> Iterator[Finding]:
    """Services of different versions, as between the steps of an upgrade, or after one that was not finished."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for one, labels, _, _ in facts.series("penstock_build_info"):
        found[labels.get("version", "")].add(one.name)
    if len(found) > 1:
        evidence = [f"{version}: {', '.join(sorted(names))}" for version, names in sorted(found.items())]
        yield Finding(
            f"The services have {len(found)} versions: an upgrade is not finished, or a deploy was wrong.",
            evidence,
            "finish the rollout, or roll it back",
            about(*(name for names in list(found.values())[1:] for name in names)),
        )


def find_bad_configuration(facts: Facts) -> Iterator[Finding]:
    """A pipe file or a service's configuration with which nothing starts: a wrong deploy."""
    if facts.mistakes and (facts.stopped or facts.state is None):
        yield Finding(
            f"The fleet does not start with this pipe file: {format_count(len(facts.mistakes), 'mistake')}.",
            facts.mistakes[:SHOWN_LINES],
            _CORRECT,
        )
    for one in _by_flow(facts):
        if one.answers:
            continue
        lines = [line.text for line in _lines_of_last_run(one) if line.at == 0 and line.text.startswith("error: ")]
        if lines:
            yield Finding(
                f"{one.name} does not start: its configuration is wrong.",
                [*lines[:SHOWN_LINES], *_log_of(one)],
                _CORRECT,
                _parts(facts, one),
            )


def find_dead(facts: Facts) -> Iterator[Finding]:
    """Processes that do not run, or that nobody answers for; and services without any process."""
    for one in _by_flow(facts):
        if one.answers or one.answer == "silent" or _keeps_dying(one):
            continue
        if one.is_local and one.status not in ("gone", "zombie") and (one.age or 0) < LISTENS_WITHIN_S:
            continue  # it is being started
        known = f"process {one.pid}" if one.pid is not None else "no process"
        what = "is dead" if not one.is_local or one.status in ("gone", "zombie") else "does not listen on its port"
        evidence = [f"{known}, http://{one.address}/readyz: {one.reason}", *_last_words(one.lines), *_log_of(one)]
        first = f"tail -50 {one.log}" if one.log is not None else f"the platform's log of {one.name}, then restart it"
        yield Finding(f"{one.name} {what}.", evidence, first, _parts(facts, one), runbook=_page_of(one))
    yield from _missing(facts)


def _missing(facts: Facts) -> Iterator[Finding]:
    """Services that the fleet needs, and that have no process in the list."""
    pipes = facts.pipes
    if pipes is None or facts.stopped or not facts.instances or any(not one.service for one in facts.instances):
        return
    observed = any(facts.series("penstock_fleet_expected", service="observer"))  # elsewhere its address may be unknown
    wanted = {service for service, _ in list_expected(pipes, ledger=observed or bool(facts.observer.address))}
    if any(facts.series("penstock_fleet_expected", service="registry")):  # the pipe file does not say
        wanted.add("registry")
    for service in FLOW:
        if service in wanted and not facts.of(service):
            names = ", ".join(one.name for one in facts.instances)
            source = "by the setting schemas, the fleet has" if service == "registry" else "the pipe file needs"
            yield Finding(
                f"No process of {service} is in the list of processes.",
                [f"{source} one; the list has {names}"],
                f"start {service}, or add it to the list",
                about(service),
            )


def find_hung(facts: Facts) -> Iterator[Finding]:
    """Processes that accept a connection and do not answer, and those that say that they make no progress."""
    for one in _by_flow(facts):
        if one.answer == "silent":
            process = "" if one.pid is None else f"process {one.pid}, "
            evidence = [f"{process}http://{one.address}/readyz: {one.reason}", *_log_of(one)]
            if one.status:
                evidence.append(f"state of the process: {one.status}")
            yield Finding(
                f"{one.name} {_how_hung(one)}.", evidence, _wake(one), _parts(facts, one), runbook=_page_of(one)
            )
        elif one.unhealthy:
            yield Finding(
                f"{one.name} runs and makes no progress: {one.unhealthy}.",
                [f"http://{one.address}/healthz", *_log_of(one)],
                _restart(one),
                _parts(facts, one),
                runbook=_page_of(one) or "PenstockProcessStuck",
            )


def _page_of(one: Instance) -> str:
    """In place of the check's page: without an autoscaler nothing else stops."""
    return "PenstockAutoscalerDown" if one.service == "autoscaler" else ""


def _how_hung(one: Instance) -> str:
    return "is stopped by a signal (SIGSTOP)" if one.status == "stopped" else "hangs"


def _wake(one: Instance) -> str:
    return f"kill -CONT {one.pid}" if one.status == "stopped" else _restart(one)


def _restart(one: Instance) -> str:
    return f"kill -KILL {one.pid}   # the supervisor starts it again" if one.pid else f"restart {one.name}"


def find_crash_loops(facts: Facts) -> Iterator[Finding]:
    """Processes that die again and again. Their last error is the evidence."""
    for one in _by_flow(facts):
        if not _keeps_dying(one):
            continue
        words = _last_words(one.lines) or ["its log has no error: it was killed, e.g. for lack of memory"]
        evidence = [f"{_restarts(one)} restarts since the fleet was started", *words, *_log_of(one)]
        first = f"tail -50 {one.log}; dmesg | grep -i 'killed process'"
        yield Finding(f"{one.name} dies again and again.", evidence, first, _parts(facts, one), runbook=_page_of(one))


def find_restarted(facts: Facts) -> Iterator[Finding]:
    """Processes that died a short time ago and run again."""
    for one in _by_flow(facts):
        if one.answers and _restarts(one) and not _keeps_dying(one) and (one.age or LOOKED_BACK_S) < LOOKED_BACK_S:
            yield Finding(
                f"{one.name} died, and has run again for {one.age:.0f} s.",
                [f"{_restarts(one)} restarts since the fleet was started", *_last_words(one.lines), *_log_of(one)],
                f"tail -50 {one.log}",
                about(one.name),
                is_note=True,
            )


def find_unready(facts: Facts) -> Iterator[Finding]:
    """Processes that answer that they are not ready, where no other check knows why."""
    for one in _by_flow(facts):
        if one.answer == "not ready":
            is_starting = _is_starting(one)
            yield Finding(
                f"{one.name} {'starts and is not ready yet' if is_starting else 'is not ready'}: {one.reason}.",
                [f"http://{one.address}/readyz", *_last_words(_lines_of_last_run(one)), *_log_of(one)],
                f"tail -50 {one.log}" if one.log is not None else f"the log of {one.name}",
                _parts(facts, one) | about(*_failing_pipes(facts, one)),
                is_note=is_starting,
            )


def _failing_pipes(facts: Facts, one: Instance) -> Iterator[str]:
    """The pipes that keep this process from being ready, without pipes whose query only starts: their faults do not matter."""
    for pipe, problem in transforms.problems_of(facts, one):
        if not problem.startswith(STARTING):
            yield f"pipe {pipe}"


def _is_starting(one: Instance) -> bool:
    """Whether it was not ready in this run yet, for no longer than a first start takes. After a restart it is a fault."""
    if one.age is None or _restarts(one):
        return False
    waits = all(part.partition(" (")[0].endswith(STARTING) for part in one.reason.split("; "))
    return one.age < (transforms.FIRST_START_S if waits and one.service == "transform" else YOUNG_S)


def _restarts(one: Instance) -> int:
    return max(one.restarts or 0, one.restarts_later or 0)


def _keeps_dying(one: Instance) -> bool:
    grew = (one.restarts_later or 0) > (one.restarts or 0)
    is_young = one.age is None or one.age < _usual_run(one)
    return _restarts(one) >= MANY_RESTARTS and (grew or is_young or not one.answers) and one.answer != "silent"


def _usual_run(one: Instance) -> float:
    """A process that has run for longer than this lives longer than in its last runs: the seconds of twice the longest of those.

    YOUNG_S where the log does not have the last starts.
    """
    starts = [line.at for line in one.lines if line.event in _STARTED][-MANY_RESTARTS:]
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    return max(YOUNG_S, min(2 * max(gaps, default=0.0), LOOKED_BACK_S))


def _by_flow(facts: Facts) -> list[Instance]:
    if facts.has_ended:
        return []  # one finding says it for all
    return sorted(
        facts.instances, key=lambda one: (FLOW.index(one.service) if one.service in FLOW else len(FLOW), one.name)
    )


def _parts(facts: Facts, one: Instance) -> frozenset[str]:
    """The instance; with its service when no other instance of that works."""
    others = [other for other in facts.of(one.service) if other is not one and other.answer == "ready"]
    return about(one.name) if others else about(one.name, one.service)


def _lines_of_last_run(one: Instance) -> list[LogLine]:
    starts = [at for at, line in enumerate(one.lines) if line.event in _STARTED]
    return list(one.lines[starts[-1] :] if starts else one.lines)


def _last_words(lines: Sequence[LogLine]) -> list[str]:
    """The newest errors in a log: of the last minutes, or without a time."""
    newest = max((line.at for line in lines), default=0.0)
    errors = [
        line.text
        for line in lines
        if (line.level in ("error", "critical") and line.at > newest - LOOKED_BACK_S) or _is_end_of_traceback(line)
    ]
    return [f"its log: {text[:300]}" for text in errors[-SHOWN_LINES:]]


def _is_end_of_traceback(line: LogLine) -> bool:
    word = line.text.split(":")[0]
    return line.at == 0 and " " not in word and word.endswith(("Error", "Exception")) and ":" in line.text


def _log_of(one: Instance) -> list[str]:
    return [] if one.log is None else [str(one.log)]


def find_damaged_schemas(facts: Facts) -> Iterator[Finding]:
    """Objects of the schema registry that are altered or missing."""
    for one, _, value, _ in facts.series("penstock_registry_objects_damaged"):
        if value:
            objects = format_count(int(value), "object")
            yield Finding(
                f"The schema registry has {objects} that were altered or are missing.",
                ["nothing can be registered until then", *one.said("registry_object_damaged")],
                log_command(one, "registry_object_damaged"),
                about("registry", one.name),
            )


def find_schema_store(facts: Facts) -> Iterator[Finding]:
    """A registry whose store does not answer. Every service has the metric; only the registry sets it."""
    for one, _, value, _ in facts.series("penstock_registry_store_up"):
        if one.service == "registry" and not value:
            yield Finding(
                f"The store of schemas does not answer {one.name}: nothing can be registered there.",
                one.said("registry_store_unavailable", "store_unavailable"),
                log_command(one, "store_unavailable"),
                about("registry", one.name),
            )
