"""`python -m tests.faults.wrong_clock MODULE …`: a service whose machine's clock is ten minutes ahead."""

import runpy
import sys
import time

AHEAD_S = 600

if __name__ == "__main__":
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + AHEAD_S
    time.time_ns = lambda: nanoseconds() + AHEAD_S * 1_000_000_000
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__")
