"""Checks of the table service: compacted streams as tables."""

from collections.abc import Iterator

from services.core.units import format_count
from services.fleet.doctor.checks.counters import find_moves, format_span, log_command
from services.fleet.doctor.diagnosis import Finding, about
from services.fleet.doctor.facts import Facts

BEHIND_S = 60.0
MANY_CUT = 10


def find_behind(facts: Facts) -> Iterator[Finding]:
    """Tables that are more than a minute behind their stream. One that reads nothing meanwhile stands still."""
    for one, labels, value, _ in facts.series("penstock_table_behind_seconds"):
        if value <= BEHIND_S:
            continue
        stream = labels["stream"]
        read = facts.growth("penstock_table_records_total", one, stream=stream)
        failures = facts.total("penstock_table_read_failures_total", one, stream=stream)
        does = f"{format_count(int(read), 'record')} read in {facts.seconds():.0f} s"
        yield Finding(
            f"Table {stream} is {format_span(value)} behind its stream{'' if read else ' and reads nothing'}: "
            f"{one.name} answers reads with 503.",
            [
                f"{does}, {format_count(int(failures), 'failed read')} since its start",
                *([f"its /readyz: {one.reason}"] if one.reason else []),
                *one.said("table_waits", stream=stream),
            ],
            log_command(one, "table_waits|table_rebuilt"),
            about(f"table {stream}", one.name, one.service),
            runbook="" if read else "PenstockStreamTableStuck",
        )


def find_rebuilt(facts: Facts) -> Iterator[Finding]:
    """Tables that were dropped and built again."""
    for one in find_moves(facts, "penstock_table_rebuilds_total", "table_rebuilt"):
        stream, reason = one.labels["stream"], one.labels["reason"]
        yield Finding(
            f"Table {stream} was built again from the beginning of its stream ({reason}).",
            one.evidence,
            log_command(one.instance, "table_rebuilt"),
            about(f"table {stream}", one.instance.name),
            is_note=one.is_old,
        )


def find_cut(facts: Facts) -> Iterator[Finding]:
    """Many connections that were closed because of their clients."""
    for one in find_moves(facts, "penstock_table_connections_cut_off_total"):
        if one.count > MANY_CUT:
            yield Finding(
                f"The table service cut off {format_count(one.count, 'connection')} ({one.labels['reason']}).",
                [one.when, *one.evidence[1:]],
                f"curl -s {one.instance.address}/metrics | grep penstock_table_",
                about(one.instance.name),
                is_note=one.is_old,
            )
