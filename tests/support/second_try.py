"""Tests on real processes and clusters get a second try when they could not get as far as their assertions.

On two shared cores a broker, a JVM or a child may be slower than any deadline that still finds a hang. An assertion that
fails, fails: what it says of lost or repeated events is never asked twice. Every second try is printed with what went wrong.
"""

import pytest

_REAL = tuple(
    f"tests/{name}/" for name in ("browser", "contract", "faults", "integration", "kafka", "spark", "upgrade")
)


def allow_second_try(item: pytest.Item) -> None:
    """Mark the test when it runs on real processes."""
    if item.nodeid.startswith(_REAL):
        item.add_marker(pytest.mark.flaky(reruns=1, rerun_except=[r"^AssertionError\b", r"^Failed\b"]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what went wrong in the first tries."""
    reports = terminalreporter.stats.get("rerun", [])
    if reports:
        terminalreporter.section("second tries")
        for report in reports:
            terminalreporter.write_line(report.nodeid)
            terminalreporter.write_line(report.longreprtext)
