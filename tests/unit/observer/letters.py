"""Dead letters for the observer's tests."""

from services.core.broker.record import Record, TopicPartition
from services.core.dead_letter import make_dead_letter
from services.core.pipes import PipeFile

HOOK = {"url": "https://example.org/hook"}
PIPES = PipeFile.model_validate(
    {
        "streams": {"orders": {}},
        "pipes": {
            "shop": {
                "sources": ["orders"],
                "destinations": [{"name": "billing", "webhook": HOOK}, {"name": "search", "webhook": HOOK}],
            }
        },
    }
)
BASE = 1_700_000_000_000


def letter(number: int, **said: object) -> Record:
    """Event `number` as a dead letter of shop/billing, first failed `number` seconds after BASE."""
    original = Record(b"k", b'{"card": "4111"}', BASE, (("ce_id", b"e%d" % number),))
    usual: dict[str, object] = {
        "reason": "http_404",
        "detail": "no",
        "node": "expel",
        "destination": "billing",
        "pipe": "shop",
    }
    source = TopicPartition("orders", 1)
    wanted = {
        **usual,
        "attempts": 7,
        "first_failure": BASE + 1000 * number,
        "source": source,
        "offset": number,
        "now_ms": BASE + 9_000_000,
        **said,
    }
    return make_dead_letter(original, **wanted)  # type: ignore[arg-type]
