"""Random searches that end after so many seconds of CPU, whatever the machine: how many cases they did is printed after the run.

They count CPU, not time: other tests on the same cores take no cases away.
"""

import time

import pytest

PROPERTY = "cases of a random search"
_FEWEST = 10
"""A search fails when it does fewer than one in `_FEWEST` of its cases: it has become too slow to find anything."""


class CpuBudget:
    """`seconds` of CPU of this process, from now on. Its clock is not virtual."""

    def __init__(self, seconds: float) -> None:
        self._end = time.process_time() + seconds

    @property
    def is_left(self) -> bool:
        """Whether another case may begin."""
        return time.process_time() < self._end


def report_cases(request: pytest.FixtureRequest, search: str, done: int, wanted: int) -> None:
    """For the summary of the run. Fails when hardly any were done."""
    request.node.user_properties.append((PROPERTY, (search, done, wanted)))
    assert done * _FEWEST >= wanted, f"{search}: only {done} of {wanted} cases within its seconds of CPU"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each search."""
    cases: dict[str, list[int]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()) if getattr(report, "when", "") == "call" else ():
                if name == PROPERTY:
                    search, done, wanted = value
                    total = cases.setdefault(search, [0, 0])
                    total[0], total[1] = total[0] + done, total[1] + wanted
    if cases:
        terminalreporter.section("random searches")
        for search, (done, wanted) in sorted(cases.items()):
            terminalreporter.write_line(f"{search}: {done:,} of {wanted:,} cases")
