"""Dead letters for the observer's tests."""

from services.core.broker.record import Record
from services.core.pipe_file.pipes import PipeFile
from tests.support.dead_letters import BASE, DEAD, dead_letter

__all__ = ["DEAD", "HOOK", "PIPES", "letter"]

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


def letter(number: int, **said: object) -> Record:
    """Event `number` as a dead letter of shop/billing, dead `number` seconds after DEAD."""
    original = Record(b"k", b'{"card": "4111"}', BASE, (("ce_id", b"e%d" % number),))
    return dead_letter(original, number, **({"pipe": "shop"} | said))
