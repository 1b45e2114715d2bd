"""Every metric of the fleet, in one place: `penstock_<service>_<what>_<unit>[_total]`, base units, docs are made from it.

A dropped, refused or retried event always counts with a `reason`. Get the labelled child once, not per event.
"""

from prometheus_client import REGISTRY, Counter, Gauge

from services.core.lag import LagFamily

INGEST_REQUESTS = Counter("penstock_ingest_requests", "Requests answered, by status.", ["stream", "status"])
INGEST_ACCEPTED = Counter("penstock_ingest_events_accepted", "Events stored durably and acknowledged.", ["stream"])
INGEST_REFUSED = Counter("penstock_ingest_events_refused", "Events refused, by problem type.", ["stream", "reason"])
INGEST_REQUESTS_REFUSED = Counter(
    "penstock_ingest_requests_refused",
    "Requests refused as a whole, by problem type, those among them that concern no stream.",
    ["reason"],
)
INGEST_BYTES = Counter("penstock_ingest_payload_bytes", "Payload bytes of accepted events.", ["stream"])
INGEST_KEYS_AGE = Gauge(
    "penstock_ingest_keys_age_seconds",
    "How long ago the keys in use were last seen to be what the keys file says; a key revoked since then is still valid.",
)
INGEST_KEYS_FAILURES = Counter(
    "penstock_ingest_keys_load_failures", "Times that the keys file could not be used; the log says why."
)
INGEST_PENDING = Gauge("penstock_ingest_pending_bytes", "Bytes waiting for the broker.")
INGEST_HELD = Gauge(
    "penstock_ingest_held_bytes",
    "Bytes of requests and unread answers that are held; over max_in_flight requests get 503.",
)
INGEST_CUT_OFF = Counter(
    "penstock_ingest_connections_cut_off", "Connections ended for what their client did, by reason.", ["reason"]
)
INGEST_IN_FLIGHT = Gauge("penstock_ingest_in_flight_requests", "Requests being read or answered.")

SIGNING_KEYS_AGE = Gauge(
    "penstock_signing_keys_age_seconds",
    "How long ago the keys that sign webhooks were last seen to be what their file says; by pipe/destination, or `alarms`.",
    ["name"],
)
SIGNING_KEYS_FAILURES = Counter(
    "penstock_signing_keys_load_failures",
    "Times that the file of a signing secret could not be used; the keys stayed as they were, and the log says why.",
    ["name"],
)

BROKER_RETRIES = Counter(
    "penstock_broker_append_retries", "Appends tried again, by reason.", ["topic", "partition", "reason"]
)
BROKER_THROTTLES = Counter(
    "penstock_broker_shard_throttles", "Entries that Kinesis refused for a shard's limits.", ["topic", "shard"]
)
BROKER_PACE_WAIT = Counter(
    "penstock_broker_shard_wait_seconds", "Time that entries waited for a shard's capacity.", ["topic", "shard"]
)
BROKER_PARTITION_BYTES = Counter(
    "penstock_broker_partition_bytes",
    "Bytes that Kinesis took from this process, by partition.",
    ["topic", "partition"],
)
BROKER_PARTITION_ENTRIES = Counter(
    "penstock_broker_partition_entries",
    "Entries that Kinesis took from this process, by partition: an append is one, or more if it is large.",
    ["topic", "partition"],
)
BROKER_CAPACITY_USED = Gauge(
    "penstock_broker_shard_capacity_used_ratio",
    "Of a second of a shard's write capacity, what this process has taken: above 1 entries wait.",
    ["topic", "shard"],
)
BROKER_PACE = Gauge(
    "penstock_broker_shard_pace_ratio",
    "The part of a shard's write capacity that this process allows itself: 1 until it is throttled.",
    ["topic", "shard"],
)
BROKER_TAG_MISSING = Gauge(
    "penstock_broker_partitions_tag_missing",
    "1 while a Kinesis stream's tag does not tell its partitions, or fewer than it had: keys may move. Else 0.",
    ["topic"],
)
BROKER_MADE_ANEW = Counter(
    "penstock_broker_streams_made_anew",
    "Streams that a group found deleted and made again: what it had not processed went with the old one.",
    ["group", "topic"],
)
BROKER_LOGS_CUT_OFF = Counter(
    "penstock_broker_logs_cut_off",
    "Partitions whose log lost its end on Kafka: the group had read further, and goes on at the cut.",
    ["group", "topic"],
)
BROKER_PREFETCHED = Gauge(
    "penstock_broker_prefetched_bytes",
    "Memory of Kinesis records that were read and not polled yet, or are being read; at most about 64 MiB.",
)
BROKER_READ_AGAIN = Counter(
    "penstock_broker_prefetched_given_up_records",
    "Records that were read ahead of a consumer that does not poll, given up for want of memory, and are read again.",
    ["topic"],
)
BROKER_READ_THROTTLES = Counter(
    "penstock_broker_shard_read_throttles", "Reads that Kinesis refused for a shard's limits.", ["topic", "shard"]
)
BROKER_READ_WAIT = Counter(
    "penstock_broker_shard_read_wait_seconds",
    "Time that reads waited for their turn: a shard answers five a second, to all groups together.",
    ["topic", "shard"],
)
BROKER_READ_PACE = Gauge(
    "penstock_broker_shard_reads_per_second",
    "Reads of a shard that this process allows itself: 5 until it is throttled.",
    ["topic", "shard"],
)
BROKER_COMMITS_REFUSED = Counter("penstock_broker_commits_refused", "Commits refused as no longer owner.", ["group"])
BROKER_REJOINS = Counter(
    "penstock_broker_rejoins",
    "Times a member could not join its group, or its membership broke, and it joined again, by reason.",
    ["group", "reason"],
)
BROKER_LAG_RECORDS = Gauge("penstock_broker_lag_records", "Records behind the end.", ["group", "topic", "partition"])
BROKER_LAG_SECONDS = Gauge(
    "penstock_broker_lag_seconds", "Age of the oldest unprocessed record.", ["group", "topic", "partition"]
)
BROKER_GAP_RECORDS = Counter(
    "penstock_broker_gap_records", "Records missing where a group wanted to read.", ["group", "topic"]
)
BROKER_DAMAGED_RECORDS = Counter(
    "penstock_broker_damaged_records",
    "Records that could not be read and went to the dead letters as the bytes that are stored.",
    ["group", "topic"],
)

EXPEL_ATTEMPTS = Counter(
    "penstock_expel_attempts", "Requests to a destination, by outcome.", ["pipe", "destination", "outcome"]
)
EXPEL_DELIVERED = Counter(
    "penstock_expel_events_delivered", "Events acknowledged by the destination.", ["pipe", "destination"]
)
EXPEL_RETRIED = Counter(
    "penstock_expel_events_retried", "Events tried again, by reason.", ["pipe", "destination", "reason"]
)
EXPEL_DEAD = Counter(
    "penstock_expel_events_dead", "Events written to dead letters, by reason.", ["pipe", "destination", "reason"]
)
EXPEL_HANDED_OVER = Counter(
    "penstock_expel_events_handed_over",
    "Events handed to the global retrier, by reason.",
    ["pipe", "destination", "reason"],
)
EXPEL_TWINS = Counter(
    "penstock_expel_retry_twins",
    "Retried events that came back twice; the second is passed over.",
    ["pipe", "destination"],
)
EXPEL_INHERITED = Counter(
    "penstock_expel_events_inherited",
    "Events that an expel which died had handed over without committing it; the next one passes over them.",
    ["pipe", "destination"],
)
EXPEL_PARKED = Counter(
    "penstock_expel_events_parked",
    "Events of a paused destination written to the pipe's parked topic, by reason: operator or 410.",
    ["pipe", "destination", "reason"],
)
EXPEL_REPLAYED = Counter(
    "penstock_expel_events_replayed", "Parked events taken again after a resume.", ["pipe", "destination"]
)
EXPEL_REMOVED = Counter(
    "penstock_expel_events_removed",
    "Events that waited for a destination which the pipe file has removed, by what became of them (delivered_elsewhere, buried, "
    "dropped).",
    ["pipe", "destination", "action"],
)
EXPEL_UNCLAIMED = Counter(
    "penstock_expel_events_unclaimed",
    "Events passed over because nobody will deliver them: the pipe file has no such destination and does not say what becomes of "
    "them, by reason.",
    ["pipe", "reason"],
)
EXPEL_PAUSED = Gauge(
    "penstock_expel_paused",
    "1 while the destination is paused, by an operator or by its 410, and its events are parked.",
    ["pipe", "destination"],
)
EXPEL_BREAKER = Gauge(
    "penstock_expel_breaker_state",
    "The destination's circuit breaker: 0 closed, 1 half-open (one request is a probe), 2 open (nothing is sent).",
    ["pipe", "destination"],
)
EXPEL_LANE_EVENTS = Gauge("penstock_expel_lane_events", "Events in flight to a destination.", ["pipe", "destination"])
EXPEL_LANE_UP = Gauge(
    "penstock_expel_lane_up",
    "1 while the lane delivers; 0 while it waits for the broker, or stopped: paused, a gap, damage.",
    ["pipe", "destination"],
)

RETRIER_TAKEN = Counter("penstock_retrier_events_taken", "Events read from retry-in or a delay topic.", ["topic"])
RETRIER_MOVED = Counter("penstock_retrier_events_moved", "Events put into a delay topic to wait on.", ["topic"])
RETRIER_ALREADY_MOVED = Counter(
    "penstock_retrier_events_already_moved",
    "Events that a process which died had written on, and that are not written twice, by the topic they were read in.",
    ["topic"],
)
RETRIER_RELEASED = Counter(
    "penstock_retrier_events_released", "Events that were due, given back to expel by the pipe's retry topic.", ["pipe"]
)
RETRIER_UNCLAIMED = Counter(
    "penstock_retrier_events_unclaimed",
    "Events that were due, and whose destination is not in the pipe file: nobody will deliver them, by reason.",
    ["reason"],
)
RETRIER_DEAD = Counter(
    "penstock_retrier_events_dead", "Records written to the retrier's dead letters, by reason.", ["reason"]
)
RETRIER_MOVE_FAILURES = Counter(
    "penstock_retrier_move_failures", "Events that a topic did not take, tried again, by reason.", ["topic", "reason"]
)
RETRIER_NEXT_DUE = Gauge(
    "penstock_retrier_next_due_timestamp_seconds", "When the first of the events read ahead is due; 0 without any."
)
RETRIER_UP = Gauge(
    "penstock_retrier_up", "1 while the retrier reads; 0 while it waits for the broker, or records are missing."
)

TRANSFORM_READ = Counter("penstock_transform_events_read", "Events taken from the sources.", ["pipe"])
TRANSFORM_WRITTEN = Counter("penstock_transform_events_written", "Events written to the output.", ["pipe"])
TRANSFORM_DEAD = Counter(
    "penstock_transform_events_dead", "Events written to dead letters, by reason.", ["pipe", "reason"]
)
TRANSFORM_FAILURES = Counter("penstock_transform_query_failures", "Times the pipe's query ended by itself.", ["pipe"])
TRANSFORM_UP = Gauge("penstock_transform_query_up", "1 while the pipe's query runs.", ["pipe"])

LEDGER_REPORTS = Counter("penstock_ledger_reports", "Records written to the telemetry topic.", ["node"])
LEDGER_BYTES = Counter("penstock_ledger_report_bytes", "Bytes written to the telemetry topic.", ["node"])
LEDGER_FAILURES = Counter(
    "penstock_ledger_report_failures",
    "Reports that were not stored and are tried again, by reason.",
    ["node", "reason"],
)
LEDGER_OUTSIDE = Counter(
    "penstock_ledger_events_outside",
    "Events settled that the ledger cannot count, because they carry no origin that can be read, by reason.",
    ["node", "pipe", "reason"],
)
LEDGER_BAD_REPORTS = Counter("penstock_ledger_bad_reports", "Records of the telemetry topic that are no reports.")
LEDGER_REPORTS_GONE = Counter(
    "penstock_ledger_reports_gone",
    "Reports that were gone by retention, or damaged, before the observer read them; their minutes may show loss that was none.",
)
LEDGER_AHEAD = Counter(
    "penstock_ledger_reports_ahead",
    "Reports whose clock was ahead of the observer's; their lags and payload fields are not counted.",
    ["node"],
)
LEDGER_STRANGERS = Counter(
    "penstock_ledger_strangers_given_up",
    "Ingest processes that never reported, and whose events were not all found within the records that are searched for them.",
)
LEDGER_FINAL = Counter(
    "penstock_ledger_final_events", "Events accepted in minutes that are final for every destination.", ["pipe"]
)
LEDGER_MISSING = Counter(
    "penstock_ledger_missing_events",
    "Events that were missing when their minute became final, or later, by the step that did not settle them.",
    ["pipe", "node", "destination"],
)
LEDGER_LOSS = Gauge(
    "penstock_ledger_loss_ratio",
    "Share of events missing in the newest minute that is final for any destination, as far as it is final, 0 to 1.",
    ["pipe"],
)
LEDGER_LOSS_FOUND = Gauge(
    "penstock_ledger_found_loss_ratio",
    "Highest share of events missing in a minute, however old, whose loss was found in the last 15 minutes, 0 to 1.",
    ["pipe"],
)
LEDGER_ALARMS = Counter(
    "penstock_ledger_alarms",
    "Alarms: a minute is final for a destination with more loss than the threshold, or its loss has doubled since.",
    ["pipe"],
)
LEDGER_ALARMS_UNTOLD = Counter("penstock_ledger_alarms_untold", "Alarms that their webhook did not get.", ["reason"])
LEDGER_DRIFTS = Counter(
    "penstock_ledger_drifts", "Payload fields that changed against the hour before, each counted once.", ["pipe"]
)
LEDGER_OPEN = Gauge(
    "penstock_ledger_open_minutes",
    "Minutes of the last 15 that are not final yet for the destination.",
    ["pipe", "destination"],
)
LEDGER_UNJUDGED = Counter(
    "penstock_ledger_unjudged_minutes",
    "Minutes that were forgotten before they were final for the destination: it was behind or silent for a day. Without a "
    "destination: what comes before them all was.",
    ["pipe", "destination"],
)
LEDGER_UNJUDGED_EVENTS = Counter(
    "penstock_ledger_unjudged_events",
    "Events that were missing in these minutes; nobody knows whether they are lost.",
    ["pipe", "destination"],
)
PIPE_HEALTH = Gauge("penstock_pipe_health", "0: healthy, 1: degraded, 2: unstable.", ["pipe"])
OBSERVER_LETTERS = Counter("penstock_observer_letters_read", "Dead letters read, again after each start.", ["topic"])
OBSERVER_PASSED_OVER = Counter(
    "penstock_observer_letters_passed_over",
    "Dead letters that count for no destination: no_destination (a transform gave up), unknown_destination, damaged.",
    ["topic", "reason"],
)
OBSERVER_TOPIC_UP = Gauge("penstock_observer_topic_up", "1 while these dead letters can be read.", ["topic"])
OBSERVER_REQUESTS = Counter("penstock_observer_requests", "Requests to the API, by status.", ["status"])
OBSERVER_TOKENS_AGE = Gauge(
    "penstock_observer_tokens_age_seconds",
    "How long ago the tokens in use were last seen to be what the token file says; one taken out since then still opens.",
)
OBSERVER_TOKENS_FAILURES = Counter(
    "penstock_observer_tokens_load_failures", "Times that the token file could not be used; the log says why."
)

AUTOSCALER_DECISIONS = Counter(
    "penstock_autoscaler_shard_decisions",
    "Looks at a stream, by what was decided: up, down, hold, or failed.",
    ["stream", "decision"],
)
AUTOSCALER_SHARDS = Gauge("penstock_autoscaler_open_shards", "Shards that can be written to.", ["stream"])
AUTOSCALER_LOAD = Gauge(
    "penstock_autoscaler_fullest_shard_ratio",
    "The load of a stream's fullest shard, of what a shard takes.",
    ["stream"],
)
AUTOSCALER_UPDATES = Gauge(
    "penstock_autoscaler_updates_used", "Updates of a rolling day, of which the service allows ten.", ["stream"]
)
AUTOSCALER_GROUP_SIZE = Gauge(
    "penstock_autoscaler_group_instances", "Instances that the platform was told to run.", ["group"]
)
AUTOSCALER_GROUP_CPU = Gauge(
    "penstock_autoscaler_group_cpu_ratio", "Average CPU of an instance, in cores, the warming ones included.", ["group"]
)
AUTOSCALER_GROUP_DECISIONS = Counter(
    "penstock_autoscaler_group_decisions",
    "Decisions, by action (out, in, hold) and reason.",
    ["group", "action", "reason"],
)
AUTOSCALER_GROUP_FAILURES = Counter(
    "penstock_autoscaler_group_failures",
    "Looks and orders that the platform did not answer, by what was asked and why.",
    ["group", "what", "reason"],
)

FLEET_RESTARTS = Counter("penstock_fleet_restarts", "Processes that died and were started again.", ["service"])
LOG_RETENTION_BEHIND = Gauge(
    "penstock_log_retention_behind_seconds",
    "Embedded log: how far the time by which retention judges ages is behind the system's clock.",
)
FLEET_LOG_LINES_LOST = Counter(
    "penstock_fleet_log_lines_lost", "Lines that a process said and its log file could not take.", ["log"]
)

LAG_IN = LagFamily("penstock_lag_in_seconds", "Event time to arrival at the node.", ["pipe", "node"])
LAG_OUT = LagFamily("penstock_lag_out_seconds", "Event time to departure from the node.", ["pipe", "node"])
INGEST_TIME = LagFamily("penstock_ingest_time_seconds", "Arrival of a request to its durable answer.", ["stream"])
TRANSIT_TIME = LagFamily(
    "penstock_transit_time_seconds", "Arrival at ingest to arrival at expel.", ["pipe", "destination"]
)
EXPEL_TIME = LagFamily(
    "penstock_expel_time_seconds", "Arrival at expel to the receiver's 2xx.", ["pipe", "destination"]
)
E2E_LAG = LagFamily("penstock_e2e_lag_seconds", "Arrival at ingest to the receiver's 2xx.", ["pipe", "destination"])
EVENT_LAG = LagFamily("penstock_event_lag_seconds", "Event time to the receiver's 2xx.", ["pipe", "destination"])
RETRIER_LATENESS = LagFamily(
    "penstock_retrier_lateness_seconds", "When an event was due to when it was given back to expel.", ["pipe"]
)

LAG_FAMILIES = (LAG_IN, LAG_OUT, INGEST_TIME, TRANSIT_TIME, EXPEL_TIME, E2E_LAG, EVENT_LAG, RETRIER_LATENESS)
for family in LAG_FAMILIES:
    REGISTRY.register(family)
del family
