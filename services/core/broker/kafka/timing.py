"""How long things may take. Fixed for production; only tests shorten them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """All in seconds.

    session: without a heartbeat for this long, a member has lost its partitions. heartbeat: how often it says so, and
    how fast it hears of a rebalance. drain: what on_revoke may take; others wait for it during a rebalance.
    request: how long one request may go unanswered; below `RetryPolicy.append_timeout`, so that a silent broker is
    found out, and its connection closed, before the append gives up. metadata: how old leaders and partition counts get.
    """

    session: float = 10.0
    heartbeat: float = 3.0
    drain: float = 35.0
    request: float = 7.0
    metadata: float = 5.0

    @property
    def rebalance(self) -> float:
        """How long the group waits for a member that drains."""
        return self.drain + 5.0
