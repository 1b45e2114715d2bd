"""`python -m tests.faults.quick_ingest`: ingest that gives an event up after seconds, as in a trial that must be short."""

import functools
import runpy

from services.core.broker.kafka import Timing, broker
from services.core.broker.producer import Producer
from services.core.broker.retry import AppendPolicy
from services.ingest import app

if __name__ == "__main__":
    policy = AppendPolicy(deadline=3.0, append_timeout=4.0)
    vars(app)["Producer"] = functools.partial(Producer, policy=policy)
    vars(broker)["Timing"] = functools.partial(Timing, request=3.0, metadata=1.0)
    runpy.run_module("services.ingest", run_name="__main__")
