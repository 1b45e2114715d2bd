"""Whether a request may go to a destination now: its rate, its breaker, the ramp after an outage. Outlives memberships."""

import time
from collections.abc import Callable

import structlog

from services.core import metrics
from services.expel.breaker import Breaker, State
from services.expel.delivery import Delivery
from services.expel.lane_bounds import LaneShape
from services.expel.outcome import Failure, Outcome
from services.expel.ramp import Ramp
from services.expel.rate import TokenBucket

log = structlog.get_logger()

_STATES = {"closed": 0, "half-open": 1, "open": 2}
_TOO_MANY = "http_429"


class Gate:
    """One destination's, in one process. `clock` is monotonic seconds. Not thread-safe."""

    def __init__(self, shape: LaneShape, clock: Callable[[], float] = time.monotonic) -> None:
        self._bucket = TokenBucket(shape.rate, clock) if shape.rate else None
        self._lane = f"{shape.pipe}/{shape.destination}"
        self._breaker, self._ramp = Breaker(clock), Ramp(clock)
        self._shown = metrics.EXPEL_BREAKER.labels(shape.pipe, shape.destination)

    @property
    def closed_until(self) -> float:
        """When a refused request may be tried again at the earliest, monotonic seconds; in the past when now."""
        return self._breaker.open_until

    @property
    def state(self) -> State:
        """The breaker's, now."""
        return self._breaker.state

    def permits(self, delivery: Delivery) -> bool:
        """Whether it may be sent; if so it counts as sent, and `ended` or `cut_off` must follow."""
        permitted = self._breaker.permits(delivery)
        if permitted:
            self._ramp.take(len(delivery.parts))
            if self._bucket is not None:
                self._bucket.take(len(delivery.parts))
        return permitted

    def wait(self) -> float:
        """Seconds until the next request may go, as far as rate and ramp are asked; 0 when it may now."""
        wait = self._ramp.wait()
        return wait if self._bucket is None else max(wait, self._bucket.wait())

    def cut_off(self, delivery: Delivery) -> None:
        """It ended here, without a word of the receiver."""
        self._breaker.unknown(delivery)

    def ended(self, delivery: Delivery, outcome: Outcome) -> None:
        """What came of it. A receiver that refuses events for good works; one that answers 429 is asked too often."""
        if isinstance(outcome, Failure) and (outcome.ours or outcome.reason == _TOO_MANY):
            self._breaker.unknown(delivery)
        elif isinstance(outcome, Failure) and outcome.recoverable:
            if self._breaker.failed(delivery):
                log.warning("breaker_open", lane=self._lane, reason=outcome.reason, detail=outcome.detail)
        else:
            if outcome is None:
                self._ramp.delivered(len(delivery.parts))
            if self._breaker.succeeded(delivery):
                self._ramp.begin()
                log.info("breaker_closed", lane=self._lane)

    def ease_in(self) -> None:
        """A backlog comes: the rate rises step by step, as after an outage."""
        self._ramp.begin()

    def show(self) -> None:
        """Bring the gauge up to date."""
        self._shown.set(_STATES[self.state])
