"""What a lane needs of a kind of destination."""

from typing import Protocol

from services.core.broker.record import Batch
from services.expel.body import Rendered
from services.expel.delivery import Delivery
from services.expel.outcome import Outcome


class Sender(Protocol):
    """One destination. Never retries: it makes one attempt and says what came of it."""

    def render(self, batch: Batch) -> Rendered:
        """Prepare polled records and sort out what cannot be delivered. Does not wait."""

    async def send(self, delivery: Delivery) -> Outcome:
        """One attempt, bounded in time. Raises nothing but CancelledError (the outcome is then unknown)."""
