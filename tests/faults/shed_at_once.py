"""`python -m tests.faults.shed_at_once`: expel that moves events to the retry topic as soon as its circuit breaker is open."""

import runpy

from services.expel import throttle

if __name__ == "__main__":
    throttle.SHED_AFTER_S = 0.0
    runpy.run_module("services.expel", run_name="__main__")
