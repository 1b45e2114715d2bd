"""What `penstock init` writes: a pipe file that works as it stands, with every choice explained."""

STARTER = """\
# yaml-language-server: $schema=./pipes.schema.json
# (penstock schema > pipes.schema.json, then editors complete and check this file)
version: 1

# A stream is where clients send events: POST /v1/streams/orders/events
streams:
  orders:
    partitions: 4        # more partitions, more parallel work; keys keep their order within one
    retention: 7d        # every duration carries its unit: ms, s, m, h, d
    id: id               # payload field with the event id; without one each event gets a new id
    key: customer        # payload field with the ordering key
    time: time           # payload field with the event time (RFC 3339, or a number of s or ms)
    columns: id STRING, time STRING, customer STRING, amount DOUBLE   # for transforms, as Spark DDL

# A pipe carries events from its sources through a transform, if it has one, to its destinations.
pipes:
  large-orders:
    sources: [orders]
    transform:
      # `event` is who the event is; what else is selected becomes the new payload
      sql: SELECT event, id, time, customer, amount, round(amount * 0.19, 2) AS vat FROM orders WHERE amount >= 100
    destinations:
      - name: billing
        webhook:
          url: http://127.0.0.1:9000/hook   # penstock listen --port 9000
          secret: {file: webhook.secret}    # penstock keys secret webhook.secret
          # body: cloudevents               # or json, ndjson
          # order: key                      # events of one key in order; default: none
          # batch: {max_events: 100, max_bytes: 1MB, max_wait: 50ms}
          # rate: 500                       # events a second at most
"""
