"""Whether a request may go to a destination now: its rate, its breaker, the ramp after an outage. Outlives memberships."""

import time
from collections.abc import Callable

import structlog

from services.core import metrics
from services.expel.breaker import Breaker, State
from services.expel.delivery import Delivery
from services.expel.diversion import Diversion
from services.expel.lane_bounds import LaneShape
from services.expel.outcome import Failure, Outcome
from services.expel.ramp import Ramp
from services.expel.rate import TokenBucket

log = structlog.get_logger()

_STATES = {"closed": 0, "half-open": 1, "open": 2}
_TOO_MANY = "http_429"
_LEAST_BREAK_S = 1.0


class Gate:
    """One destination's, in one process. `clock` is monotonic seconds. Not thread-safe."""

    def __init__(self, shape: LaneShape, clock: Callable[[], float] = time.monotonic) -> None:
        self._bucket = TokenBucket(shape.rate, clock) if shape.rate else None
        self._lane = f"{shape.pipe}/{shape.destination}"
        self._breaker, self._ramp, self.diversion = Breaker(clock), Ramp(clock), Diversion(clock)
        self._diverts, self._clock = shape.retry.hands_over, clock
        self._shown = metrics.EXPEL_BREAKER.labels(shape.pipe, shape.destination)

    @property
    def is_shut(self) -> bool:
        """Whether no request may go, because the last ones failed: what is due is put away (`diversion`)."""
        return self._breaker.is_shut

    @property
    def state(self) -> State:
        """The breaker's, now."""
        return self._breaker.state

    def shut_for(self) -> float:
        """Seconds until the receiver may be asked again at the earliest; 0 when a probe may go or is under way."""
        return max(0.0, self._breaker.open_until - self._clock())

    def take(self, delivery: Delivery) -> None:
        """It is sent now, while the gate is not shut; `ended` or `cut_off` must follow."""
        self._breaker.take(delivery)
        self._ramp.take(len(delivery.parts))
        if self._bucket is not None:
            self._bucket.take(len(delivery.parts))

    def wait(self) -> float:
        """Seconds until the next request may go, or until some may be put away; 0 when it is now."""
        if self._breaker.is_shut:
            if self._diverts:
                return self.diversion.wait()
            return max(_LEAST_BREAK_S, self.shut_for())
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
                self.diversion.begin(self._ramp.usual)
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
