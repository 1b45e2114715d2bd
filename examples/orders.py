"""Orders as events, and their states as a table: `orders.yaml` has the streams."""

import json
import sys
from urllib.error import HTTPError
from urllib.request import Request, urlopen


class Orders:
    """Commands and queries of a shop. One writer: with several, each needs its own orders."""

    def __init__(self, ingest: str, tables: str) -> None:
        self._ingest, self._tables, self._token = ingest, tables, ""

    def handle(self, event: dict[str, object]) -> dict[str, object]:
        """Store the event, then the new state of its order. Returns the state."""
        self._send("order-events", event)
        state = apply(self.find(str(event["order"])), event)
        self._token = self._send("order-states", state)
        return state

    def find(self, order: str) -> dict[str, object]:
        """The state of an order, with everything that this writer has stored; {} for a new one."""
        try:
            return dict(json.load(urlopen(f"{self._tables}/v1/tables/order-states/{order}?at_least={self._token}")))
        except HTTPError as error:
            if error.code != 404:
                raise
            return {}

    def _send(self, stream: str, event: dict[str, object]) -> str:
        body, headers = json.dumps(event).encode(), {"Content-Type": "application/json"}
        with urlopen(Request(f"{self._ingest}/v1/streams/{stream}/events", body, headers)) as answer:
            return str(answer.headers.get("Penstock-Token", ""))


def apply(state: dict[str, object], event: dict[str, object]) -> dict[str, object]:
    """The state of an order behind an event."""
    total = float(str(state.get("total", 0))) + float(str(event.get("price", 0)))
    status = {"item-added": "open", "paid": "paid", "shipped": "shipped"}[str(event["type"])]
    return {"order": event["order"], "status": status, "total": total, "events": int(str(state.get("events", 0))) + 1}


if __name__ == "__main__":
    shop = Orders(*sys.argv[1:3])
    for kind, price in (("item-added", 30), ("item-added", 12.5), ("paid", 0), ("shipped", 0)):
        print(shop.handle({"order": "o-1", "type": kind, "price": price}))
