"""Dead letters as expel writes them."""

from services.core.broker.record import Record, TopicPartition
from services.core.undelivered.dead_letter import make_dead_letter

BASE = 1_700_000_000_000
DEAD = BASE + 9_000_000
"""Their events were tried for so long."""


def dead_letter(original: Record, number: int, **said: object) -> Record:
    """The dead letter of an event that billing refused, first failed `number` seconds after BASE, dead as long after DEAD."""
    usual: dict[str, object] = {
        "reason": "http_404",
        "detail": "no",
        "node": "expel",
        "destination": "billing",
        "attempts": 7,
        "first_failure": BASE + 1000 * number,
        "source": TopicPartition("orders", 1),
        "offset": number,
        "now_ms": DEAD + 1000 * number,
    }
    return make_dead_letter(original, **(usual | said))  # type: ignore[arg-type]
