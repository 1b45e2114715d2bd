"""Broker URLs: what is not understood is refused before anything starts."""

import pytest

from services.core.broker.connect import BadBrokerUrl, open_broker


@pytest.mark.parametrize(
    "url",
    [
        "kafka://h:9092?acks=1",
        "log:///tmp/x?sync=off",
        "kafka://h:9092/x",
        "kafka://h",
        "kafka://h:99999999",
        "kafka://h:9092,",
        "kafka://user:hunter2@h:9092",
        "log://relative",
        "redis://h:1",
        "",
    ],
)
def test_refused(url: str) -> None:
    """Broken: somebody believes that acks=1, or a second host, is in force."""
    with pytest.raises(BadBrokerUrl) as caught:
        open_broker(url)
    assert "hunter2" not in str(caught.value)
