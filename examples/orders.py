"""Event-sourced orders with a read model: a shop appends events, a projector derives their states (see orders.yaml)."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.error import HTTPError
from urllib.request import Request, urlopen

INGEST, TABLES, MODE, WHAT = sys.argv[1:]


def find(order: str, at_least: str = "") -> dict:
    try:
        return json.load(urlopen(f"{TABLES}/v1/tables/order-states/{order}?at_least={at_least}", timeout=30))
    except HTTPError as error:
        if error.code != 404:
            raise
        return {"version": 0, "total": 0}


def append(stream: str, *events: dict) -> str:
    url, body = f"{INGEST}/v1/streams/{stream}/events", json.dumps(events).encode()
    request = Request(url, body, {"Content-Type": "application/json"})
    return urlopen(request, timeout=30).headers.get("Penstock-Token", "")


class Projector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Apply the events of a request. An error cuts the connection, and they come again."""
        for event in json.loads(self.rfile.read(int(self.headers["Content-Length"]))):
            state = find(event["order"], Projector.token)
            if event["version"] > state["version"] + 1:
                raise ValueError(f"the event before {event['id']} did not come")
            if event["version"] == state["version"] + 1:  # an older one came for the second time
                Projector.token = append("order-states", {**event, "total": state["total"] + event["price"]})
        self.send_response(204)
        self.end_headers()


if MODE == "fold":
    Projector.token = append("order-states", {"order": "last-start"})  # covers what an earlier projector has stored
    HTTPServer(("127.0.0.1", int(WHAT)), Projector).serve_forever()
for kind, price in (("item-added", 30), ("item-added", 12.5), ("paid", 0), ("shipped", 0)):
    version = find(WHAT)["version"] + 1
    append("order-events", {"id": f"{WHAT}/{version}", "order": WHAT, "version": version, "type": kind, "price": price})
    while (state := find(WHAT))["version"] < version:
        time.sleep(0.05)
    print(state["type"], state["version"], state["total"])
