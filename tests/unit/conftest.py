"""What unit tests share."""

from functools import partial

import pytest

from services.core.broker.retry import AppendPolicy

_STORING = frozenset({"autoscaler", "core", "fleet", "global_retrier", "observer", "table"})
"""Folders whose tests store records on a real embedded log, and look at something else."""


@pytest.fixture(autouse=True)
def _patient_producers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that stands still for seconds fails no test: producers without a policy of their own wait for it."""
    if request.path.parent.name in _STORING:
        patient = partial(AppendPolicy, deadline=600.0, append_timeout=600.0)
        monkeypatch.setattr("services.core.broker.producer.AppendPolicy", patient)
