"""All metrics of the fleet: `penstock_<service>_<subject>_<unit>[_total]`, in base units. They generate docs/metrics.md.

A dropped, refused or retried event always counts with a `reason`. Look a labelled child up once, not per event.

Fleets have a thousand destinations. So a family with the label `destination` has few other label values, and buckets only where
a rule or dashboard reads them: docs/metrics.md states the bound, tests/unit/expel/test_series.py checks it.
"""

from prometheus_client import REGISTRY, Counter, Gauge, disable_created_metrics

from services.core.lag import COARSE_SECONDS, FINE_SECONDS, LagFamily

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which nobody reads

INGEST_REQUESTS = Counter("penstock_ingest_requests", "Requests answered, by status.", ["stream", "status"])
INGEST_ACCEPTED = Counter("penstock_ingest_events_accepted", "Events stored durably and acknowledged.", ["stream"])
INGEST_REFUSED = Counter("penstock_ingest_events_refused", "Events refused, by problem type.", ["stream", "reason"])
INGEST_ABSENT = Counter(
    "penstock_ingest_fields_absent",
    "Events without the field that the stream names in the pipe file. use: id, key or time.",
    ["stream", "use"],
)
INGEST_REQUESTS_REFUSED = Counter(
    "penstock_ingest_requests_refused",
    "Requests refused as a whole, by problem type, including requests that name no stream.",
    ["reason"],
)
INGEST_BYTES = Counter("penstock_ingest_payload_bytes", "Payload bytes of accepted events.", ["stream"])
INGEST_KEYS_AGE = Gauge(
    "penstock_ingest_keys_age_seconds",
    "Time since the keys in use last matched the keys file. A key that was revoked since then is still valid.",
)
INGEST_KEYS_FAILURES = Counter(
    "penstock_ingest_keys_load_failures", "Failed loads of the keys file. The log has the reason."
)
INGEST_PENDING = Gauge("penstock_ingest_pending_bytes", "Bytes that wait for the broker.")
INGEST_HELD = Gauge(
    "penstock_ingest_held_bytes",
    "Bytes of requests, and of answers that clients have not read. Above max_in_flight, requests get 503.",
)
INGEST_CUT_OFF = Counter(
    "penstock_ingest_connections_cut_off", "Connections closed because of their client, by reason.", ["reason"]
)
INGEST_IN_FLIGHT = Gauge("penstock_ingest_in_flight_requests", "Requests being read or answered.")

SIGNING_KEYS_AGE = Gauge(
    "penstock_signing_keys_age_seconds",
    "Time since the keys that sign webhooks last matched their file, by pipe/destination, or `alarms`.",
    ["name"],
)
SIGNING_KEYS_FAILURES = Counter(
    "penstock_signing_keys_load_failures",
    "Failed loads of a signing secret's file. The old keys stay in use; the log has the reason.",
    ["name"],
)

CREDENTIALS_AGE = Gauge(
    "penstock_credentials_age_seconds",
    "Time since a credential for a receiver last matched its files, by pipe/destination and key of the pipe file.",
    ["name", "key"],
)
CREDENTIALS_FAILURES = Counter(
    "penstock_credentials_load_failures",
    "Failed loads of a credential's files. The old content stays in use; the log has the reason.",
    ["name", "key"],
)

CERTIFICATE_EXPIRY = Gauge(
    "penstock_certificate_expiry_timestamp_seconds",
    "When a certificate in a file of ours expires: our own, the first in the file; of trusted authorities, the one that "
    "expires last. By pipe/destination and key of the pipe file; `kafka`: of the file that ?security= names.",
    ["name", "key"],
)

TOKEN_EXPIRY = Gauge(
    "penstock_token_expiry_timestamp_seconds",
    "When a token ends with which expel authenticates itself: `exp` of a JWT. Other tokens have no date. By pipe/destination "
    "and key of the pipe file.",
    ["name", "key"],
)
TOKEN_ISSUED = Gauge(
    "penstock_token_issued_timestamp_seconds",
    "When such a token was issued: `iat` of the JWT; without it, when expel read it first.",
    ["name", "key"],
)

SECRET_EXPIRY = Gauge(
    "penstock_secret_expiry_timestamp_seconds",
    "When a secret ends, if its file or variable has a line `# expires: …`. By pipe/destination and key of the pipe file; "
    "`alarms`, `observer`, `kafka`; `ingest`, `registry` or `table` and the id of a valid API key (the next 100).",
    ["name", "key"],
)
SECRET_WRITTEN = Gauge(
    "penstock_secret_written_timestamp_seconds",
    "When the file of a secret was last changed, also of one without a date; when an API key with a date was made.",
    ["name", "key"],
)

BROKER_RETRIES = Counter(
    "penstock_broker_append_retries", "Appends that were retried, by reason.", ["topic", "partition", "reason"]
)
BROKER_HOME_CHANGES = Counter(
    "penstock_broker_home_changes",
    "Steps of migrations that this process has followed, by stream.",
    ["stream", "state"],
)
BROKER_THROTTLES = Counter(
    "penstock_broker_shard_throttles", "Entries that Kinesis refused because of a shard's limits.", ["topic", "shard"]
)
BROKER_QUOTA_WAIT = Counter(
    "penstock_broker_quota_wait_seconds", "Time for which Kafka asked this process to send nothing, because of a quota."
)
BROKER_PACE_WAIT = Counter(
    "penstock_broker_shard_wait_seconds", "Time that entries waited for a shard's capacity.", ["topic", "shard"]
)
BROKER_PARTITION_BYTES = Counter(
    "penstock_broker_partition_bytes",
    "Bytes that Kinesis accepted from this process, by partition.",
    ["topic", "partition"],
)
BROKER_PARTITION_ENTRIES = Counter(
    "penstock_broker_partition_entries",
    "Entries that Kinesis accepted from this process, by partition. An append is one entry, or more if it is large.",
    ["topic", "partition"],
)
BROKER_CAPACITY_USED = Gauge(
    "penstock_broker_shard_capacity_used_ratio",
    "Share of one second of a shard's write capacity that this process has used. Above 1, entries wait.",
    ["topic", "shard"],
)
BROKER_PACE = Gauge(
    "penstock_broker_shard_pace_ratio",
    "Share of a shard's write capacity that this process may use. 1 until it is throttled.",
    ["topic", "shard"],
)
BROKER_TAG_MISSING = Gauge(
    "penstock_broker_partitions_tag_missing",
    "1 while the tag of a Kinesis stream has no number of partitions, or a smaller one than before: keys may move. Else 0.",
    ["topic"],
)
BROKER_MADE_ANEW = Counter(
    "penstock_broker_streams_made_anew",
    "Streams that a group found deleted and created again. Its unprocessed records went with the old stream.",
    ["group", "topic"],
)
BROKER_LOGS_CUT_OFF = Counter(
    "penstock_broker_logs_cut_off",
    "Partitions whose log lost its end on Kafka. The group had read further and continues at the new end.",
    ["group", "topic"],
)
BROKER_PREFETCHED = Gauge(
    "penstock_broker_prefetched_bytes",
    "Memory of Kinesis records that are being read, or were read and not polled yet. At most about 64 MiB.",
)
BROKER_READ_AGAIN = Counter(
    "penstock_broker_prefetched_given_up_records",
    "Records that were read ahead for a consumer that does not poll, and dropped to free memory. They are read again.",
    ["topic"],
)
BROKER_COPIES = Counter(
    "penstock_broker_copies_skipped_records",
    "Records that a Kinesis member skipped: the second copies of puts that were repeated because their outcome was unknown.",
    ["topic"],
)
BROKER_READ_THROTTLES = Counter(
    "penstock_broker_shard_read_throttles",
    "Reads that Kinesis refused because of a shard's limits.",
    ["topic", "shard"],
)
BROKER_READ_WAIT = Counter(
    "penstock_broker_shard_read_wait_seconds",
    "Time that reads waited for their turn. A shard allows five reads per second, for all groups together.",
    ["topic", "shard"],
)
BROKER_READ_PACE = Gauge(
    "penstock_broker_shard_reads_per_second",
    "Reads of a shard per second that this process may make. 5 until it is throttled.",
    ["topic", "shard"],
)
BROKER_ACCESS_REFUSED = Counter(
    "penstock_broker_access_refused",
    "Connections to Kafka that failed because of a login or a certificate, ours or the cluster's.",
)
BROKER_TOKEN_REQUESTS = Counter(
    "penstock_broker_token_requests",
    "Requests to the OAuth token server for Kafka, by outcome: `ok`, or the reason of the failure.",
    ["outcome"],
)
BROKER_COMMITS_REFUSED = Counter(
    "penstock_broker_commits_refused", "Commits refused because the member no longer owned the partition.", ["group"]
)
BROKER_REJOINS = Counter(
    "penstock_broker_rejoins",
    "Joins that failed, and memberships that broke and were joined again, by reason.",
    ["group", "reason"],
)
BROKER_LAG_RECORDS = Gauge(
    "penstock_broker_lag_records",
    "Records between the group's commit and the end of the partition.",
    ["group", "topic", "partition"],
)
BROKER_LAG_SECONDS = Gauge(
    "penstock_broker_lag_seconds",
    "Seconds that the oldest unprocessed record has waited.",
    ["group", "topic", "partition"],
)
BROKER_GAP_RECORDS = Counter(
    "penstock_broker_gap_records", "Records that were missing at the position where a group read.", ["group", "topic"]
)
BROKER_DAMAGED_RECORDS = Counter(
    "penstock_broker_damaged_records",
    "Unreadable records that were written to the dead letters as stored bytes.",
    ["group", "topic"],
)

EXPEL_ATTEMPTS = Counter(
    "penstock_expel_attempts", "Requests to a destination, by outcome.", ["pipe", "destination", "outcome"]
)
EXPEL_TOKEN_REQUESTS = Counter(
    "penstock_expel_token_requests",
    "Requests to the OAuth token server of a destination, by outcome: `ok`, or the reason of the failure.",
    ["pipe", "destination", "outcome"],
)
EXPEL_DELIVERED = Counter(
    "penstock_expel_events_delivered", "Events acknowledged by the destination.", ["pipe", "destination"]
)
EXPEL_RETRIED = Counter(
    "penstock_expel_events_retried", "Events that were retried, by reason.", ["pipe", "destination", "reason"]
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
    "Retried events that came back twice. The second one is skipped.",
    ["pipe", "destination"],
)
EXPEL_FILTERED = Counter(
    "penstock_expel_events_filtered",
    "Events of the transform's result that are in other outputs than the destination's, and are not sent to it.",
    ["pipe", "destination"],
)
EXPEL_TOMBSTONES = Counter(
    "penstock_expel_tombstones",
    "Records without a value, which are skipped: of a topic of others, or tombstones of a compacted stream.",
    ["pipe", "destination"],
)
EXPEL_INHERITED = Counter(
    "penstock_expel_events_inherited",
    "Events that an earlier expel had written to the retrier and not committed. The next expel skips them.",
    ["pipe", "destination"],
)
EXPEL_PARKED = Counter(
    "penstock_expel_events_parked",
    "Events of a paused destination written to the pipe's parked topic, by reason: operator or 410.",
    ["pipe", "destination", "reason"],
)
EXPEL_REPLAYED = Counter(
    "penstock_expel_events_replayed", "Parked events that were read again after a resume.", ["pipe", "destination"]
)
EXPEL_REMOVED = Counter(
    "penstock_expel_events_removed",
    "Events that waited for a destination that was removed from the pipe file, by action: delivered_elsewhere, buried, "
    "dropped.",
    ["pipe", "destination", "action"],
)
EXPEL_UNCLAIMED = Counter(
    "penstock_expel_events_unclaimed",
    "Events skipped because the pipe file has no such destination and no entry for it under `removed`, by reason. Nobody "
    "delivers them.",
    ["pipe", "reason"],
)
EXPEL_PAUSED = Gauge(
    "penstock_expel_paused",
    "1 while the destination is paused, by an operator or by its 410. Its events are parked.",
    ["pipe", "destination"],
)
EXPEL_BREAKER = Gauge(
    "penstock_expel_breaker_state",
    "The destination's circuit breaker: 0 closed, 1 half-open (one request is a probe), 2 open (nothing is sent).",
    ["pipe", "destination"],
)
EXPEL_NEXT_PROBE = Gauge(
    "penstock_expel_next_probe_timestamp_seconds",
    "While the destination's circuit breaker is open: the time from which the next event that is due tests its receiver.",
    ["pipe", "destination"],
)
EXPEL_LANE_EVENTS = Gauge("penstock_expel_lane_events", "Events in flight to a destination.", ["pipe", "destination"])
EXPEL_LANE_UP = Gauge(
    "penstock_expel_lane_up",
    "1 while the lane is in its group, also while the broker is down. 0 before it joins, while it is paused, and while missing "
    "or damaged records stop it.",
    ["pipe", "destination"],
)

RETRIER_TAKEN = Counter("penstock_retrier_events_taken", "Events read from retry-in or a delay topic.", ["topic"])
RETRIER_MOVED = Counter("penstock_retrier_events_moved", "Events written to another delay topic.", ["topic"])
RETRIER_ALREADY_MOVED = Counter(
    "penstock_retrier_events_already_moved",
    "Events that an earlier process had already moved, so that they are not written again, by the topic of origin.",
    ["topic"],
)
RETRIER_RELEASED = Counter(
    "penstock_retrier_events_released", "Events that were due and written to the retry topic of the pipe.", ["pipe"]
)
RETRIER_UNCLAIMED = Counter(
    "penstock_retrier_events_unclaimed",
    "Events that were due and whose destination is not in the pipe file, by reason. Nobody delivers them.",
    ["reason"],
)
RETRIER_DEAD = Counter(
    "penstock_retrier_events_dead", "Records written to the retrier's dead letters, by reason.", ["reason"]
)
RETRIER_MOVE_FAILURES = Counter(
    "penstock_retrier_move_failures", "Failed appends of events, which are retried, by reason.", ["topic", "reason"]
)
RETRIER_NEXT_DUE = Gauge(
    "penstock_retrier_next_due_timestamp_seconds",
    "Due time of the first event that was read ahead. 0 if there is none.",
)
RETRIER_UP = Gauge(
    "penstock_retrier_up", "1 while the retrier reads. 0 while it waits for the broker, or while records are missing."
)

TRANSFORM_READ = Counter("penstock_transform_events_read", "Events read from the sources.", ["pipe"])
TRANSFORM_WRITTEN = Counter("penstock_transform_events_written", "Events written to the output.", ["pipe"])
TRANSFORM_DEAD = Counter(
    "penstock_transform_events_dead", "Events written to dead letters, by reason.", ["pipe", "reason"]
)
TRANSFORM_LEFT_OUT = Counter(
    "penstock_transform_events_left_out",
    "Events that a reset to a time left out, by reason: before_time (stored, older than the time; it is not known whether they "
    "were transformed before), gone (removed by retention; if the former position is not known, some may have been transformed).",
    ["pipe", "reason"],
)
TRANSFORM_FAILURES = Counter("penstock_transform_query_failures", "Failures of the pipe's query.", ["pipe"])
TRANSFORM_UP = Gauge(
    "penstock_transform_query_up", "1 while the pipe's query runs. 0 also while it is paused.", ["pipe"]
)
TRANSFORM_BATCHES = Counter("penstock_transform_batches", "Batches that Spark has finished.", ["pipe"])
TRANSFORM_BATCH_SECONDS = Counter(
    "penstock_transform_batch_seconds",
    "Time of the finished batches by phase, in Spark's words: latestOffset (ask the sources), queryPlanning, walCommit and "
    "commitOffsets (the checkpoint), addBatch (read, transform, write), other.",
    ["pipe", "phase"],
)
TRANSFORM_STATE_ROWS = Gauge(
    "penstock_transform_state_rows",
    "Rows that the pipe's transform keeps over batches. Only of pipes with state.",
    ["pipe"],
)
TRANSFORM_STATE_BYTES = Gauge(
    "penstock_transform_state_bytes",
    "Size of that state, where: memory (with RocksDB its caches and write buffers), disk (RocksDB's files).",
    ["pipe", "where"],
)
SPARK_TASKS = Counter(
    "penstock_spark_tasks",
    "Tasks that Spark has run, by outcome: succeeded, failed. Failed ones run again.",
    ["outcome"],
)
SPARK_TASK_SECONDS = Counter(
    "penstock_spark_task_seconds",
    "Time of Spark's tasks in Java, kind: run, cpu, gc (the pauses of its executor meanwhile). cpu is without Python workers.",
    ["kind"],
)
SPARK_SPILLED = Counter(
    "penstock_spark_spilled_bytes",
    "Data for which tasks had no memory, where: memory (its size before), disk (its size as it was written).",
    ["where"],
)
TRANSFORM_EXECUTORS = Gauge(
    "penstock_transform_executors",
    "Executors that a cluster's master has given to the transform service; 0 on a local master.",
)
TRANSFORM_EXECUTORS_LOST = Counter(
    "penstock_transform_executors_lost",
    "Executors that ended or went away. Their tasks run again. Those that the fleet's autoscaler ordered to leave do not count; "
    "those that Spark's own allocation gives back when they are idle do.",
)
TABLE_AGE = Gauge(
    "penstock_transform_table_age_seconds",
    "Time since a table of the pipe file was last read in full, or found unchanged. Since the start while it never was.",
    ["table"],
)
TABLE_REFRESH = Gauge(
    "penstock_transform_table_refresh_seconds", "How often the table is read again, by the pipe file.", ["table"]
)
TABLE_ROWS = Gauge("penstock_transform_table_rows", "Rows of the table's content that transforms use.", ["table"])
TABLE_FAILURES = Counter(
    "penstock_transform_table_refresh_failures", "Failed readings of a table. The last content stays.", ["table"]
)
TRANSFORM_PAUSED = Gauge(
    "penstock_transform_paused", "1 while an operator pauses the pipe. Its events wait in its sources.", ["pipe"]
)
TRANSFORM_MODE = Gauge(
    "penstock_transform_mode",
    "1 for the mode in which the pipe runs: real-time or micro-batch. why: the reason against real-time mode, if the pipe "
    "file does not set the mode (docs/transforms.md).",
    ["pipe", "mode", "why"],
)

LEDGER_REPORTS = Counter("penstock_ledger_reports", "Records written to the telemetry topic.", ["node"])
LEDGER_BYTES = Counter("penstock_ledger_report_bytes", "Bytes written to the telemetry topic.", ["node"])
LEDGER_FAILURES = Counter(
    "penstock_ledger_report_failures",
    "Reports that were not stored and are retried, by reason.",
    ["node", "reason"],
)
LEDGER_OUTSIDE = Counter(
    "penstock_ledger_events_outside",
    "Events that the ledger does not count, by reason: without a readable origin, or in a topic of others too old, or in gaps "
    "that were closed (then offsets, which may have no event).",
    ["node", "pipe", "reason"],
)
LEDGER_BAD_REPORTS = Counter("penstock_ledger_bad_reports", "Records of the telemetry topic that are not reports.")
NOT_UNDERSTOOD = Counter(
    "penstock_not_understood",
    "Records, or parts of records, that a newer version wrote and that this one cannot use, by format and reason. The rest of "
    "the record counts.",
    ["format", "reason"],
)
LEDGER_REPORTS_GONE = Counter(
    "penstock_ledger_reports_gone",
    "Reports that retention removed, or that were damaged, before the observer read them. Their minutes may show loss falsely.",
)
LEDGER_AHEAD = Counter(
    "penstock_ledger_reports_ahead",
    "Reports with a clock ahead of the observer's. Their lags and payload fields are not counted.",
    ["node"],
)
LEDGER_STRANGERS = Counter(
    "penstock_ledger_strangers_given_up",
    "Ingest processes that never reported, and whose events were not all found in the records that are searched for them.",
)
LEDGER_FINAL = Counter(
    "penstock_ledger_final_events", "Events accepted in minutes that are final for all destinations.", ["pipe"]
)
LEDGER_MISSING = Counter(
    "penstock_ledger_missing_events",
    "Events that were missing when their minute became final, or later, by the step that did not settle them.",
    ["pipe", "node", "destination"],
)
LEDGER_LOSS = Gauge(
    "penstock_ledger_loss_ratio",
    "Share of events missing (0 to 1) in the newest minute that is final for any destination, counted for those destinations.",
    ["pipe"],
)
LEDGER_LOSS_FOUND = Gauge(
    "penstock_ledger_found_loss_ratio",
    "Highest share of events missing (0 to 1) in any minute whose loss was found in the last 15 minutes.",
    ["pipe"],
)
LEDGER_ALARMS = Counter(
    "penstock_ledger_alarms",
    "Alarms. A minute became final for a destination with more loss than the threshold, or its loss has doubled since.",
    ["pipe"],
)
LEDGER_ALARMS_UNTOLD = Counter(
    "penstock_ledger_alarms_untold", "Alarms that were not delivered to their webhook.", ["reason"]
)
LEDGER_DRIFTS = Counter(
    "penstock_ledger_drifts", "Payload fields that changed compared with the hour before. Each counts once.", ["pipe"]
)
LEDGER_OPEN = Gauge(
    "penstock_ledger_open_minutes",
    "Minutes among the last 15 that are not final for the destination yet.",
    ["pipe", "destination"],
)
LEDGER_WAITING = Gauge(
    "penstock_ledger_waiting_events",
    "Events that wait for another attempt at the destination: with the retrier, or parked.",
    ["pipe", "destination"],
)
LEDGER_UNJUDGED = Counter(
    "penstock_ledger_unjudged_minutes",
    "Minutes that were dropped before they were final for the destination, which was behind or silent for a day. Without a "
    "destination: a step before all destinations was.",
    ["pipe", "destination"],
)
LEDGER_UNJUDGED_EVENTS = Counter(
    "penstock_ledger_unjudged_events",
    "Events that were missing in these minutes. Whether they are lost is unknown.",
    ["pipe", "destination"],
)
PIPE_HEALTH = Gauge("penstock_pipe_health", "0: healthy, 1: degraded, 2: unstable.", ["pipe"])
OBSERVER_LETTERS = Counter(
    "penstock_observer_letters_read", "Dead letters read. Each start reads them again.", ["topic"]
)
OBSERVER_PASSED_OVER = Counter(
    "penstock_observer_letters_passed_over",
    "Dead letters that count for no destination, by reason: no_destination (a transform wrote it), unknown_destination, damaged.",
    ["topic", "reason"],
)
OBSERVER_TOPIC_UP = Gauge("penstock_observer_topic_up", "1 while these dead letters can be read.", ["topic"])
OBSERVER_REQUESTS = Counter("penstock_observer_requests", "Requests to the API, by status.", ["status"])
OBSERVER_SPEAKS = Gauge(
    "penstock_observer_speaks", "1 while this observer raises the alarms, 0 while it stands by for another one."
)
OBSERVER_TOKENS_AGE = Gauge(
    "penstock_observer_tokens_age_seconds",
    "Time since the tokens in use last matched the token file. A token that was revoked since is still valid.",
)
OBSERVER_TOKENS_FAILURES = Counter(
    "penstock_observer_tokens_load_failures", "Failed loads of the token file. The log has the reason."
)

AUTOSCALER_DECISIONS = Counter(
    "penstock_autoscaler_shard_decisions",
    "Decisions on a stream: up, down, hold, or failed.",
    ["stream", "decision"],
)
AUTOSCALER_SHARDS = Gauge("penstock_autoscaler_open_shards", "Open shards.", ["stream"])
AUTOSCALER_LOAD = Gauge(
    "penstock_autoscaler_fullest_shard_ratio",
    "Load of a stream's fullest shard, as a share of a shard's capacity.",
    ["stream"],
)
AUTOSCALER_UPDATES = Gauge(
    "penstock_autoscaler_updates_used", "Shard updates in the last 24 hours. Kinesis allows ten.", ["stream"]
)
AUTOSCALER_REFUSED = Gauge(
    "penstock_autoscaler_stream_refused",
    "1 while a stream needs more shards or partitions and the autoscaler cannot or must not add them. Its log has the reason.",
    ["stream"],
)
AUTOSCALER_GROUP_SIZE = Gauge(
    "penstock_autoscaler_group_instances", "Instances that the platform was asked to run.", ["group"]
)
AUTOSCALER_GROUP_CPU = Gauge(
    "penstock_autoscaler_group_cpu_ratio",
    "Average CPU of an instance, in cores, including instances that are starting.",
    ["group"],
)
AUTOSCALER_GROUP_DECISIONS = Counter(
    "penstock_autoscaler_group_decisions",
    "Decisions, by action (out, in, replace, hold) and reason.",
    ["group", "action", "reason"],
)
AUTOSCALER_GROUP_MEMBERS = Gauge(
    "penstock_autoscaler_group_members",
    "Instances by state: working, starting, leaving, or failed: for longer than failed_after in one of the others, or absent.",
    ["group", "state"],
)
AUTOSCALER_GROUP_FROZEN = Gauge(
    "penstock_autoscaler_group_frozen",
    "1 while decisions about the group are not carried out, because a person has frozen it or the freezes are unknown.",
    ["group"],
)
AUTOSCALER_HOT_PARTITION = Gauge(
    "penstock_autoscaler_hot_partition_lag_seconds",
    "Lag that more instances of the group cannot reduce: in this partition of a consumer group (lane).",
    ["group", "lane", "topic", "partition"],
)
AUTOSCALER_GROUP_FAILURES = Counter(
    "penstock_autoscaler_group_failures",
    "Requests to the platform that failed, by request and reason.",
    ["group", "what", "reason"],
)

REGISTRY_REQUESTS = Counter("penstock_registry_requests", "Requests to the registry, by status.", ["status"])
REGISTRY_REFUSED = Counter(
    "penstock_registry_requests_refused", "Requests that the registry refused, by problem type.", ["reason"]
)
REGISTRY_REGISTRATIONS = Counter(
    "penstock_registry_registrations",
    "Registrations of a schema or a whole protocol that was read without a mistake, by outcome: new, known (nothing was stored), "
    "incompatible, invalid, read_only, failed.",
    ["outcome"],
)
REGISTRY_ENTRIES = Gauge("penstock_registry_entries", "The last entry of the registry's log that this process knows.")
REGISTRY_SCHEMAS = Gauge("penstock_registry_schemas", "Schemas with an id that this process knows.")
REGISTRY_APPENDS = Counter(
    "penstock_registry_appends",
    "Attempts to append to the registry's log: stored; lost_race (another one was faster); refused (by the store; nothing was "
    "stored); unknown (no answer, and it was tried again).",
    ["outcome"],
)
REGISTRY_DAMAGED = Gauge(
    "penstock_registry_objects_damaged",
    "Stored objects that are missing or altered. Meanwhile nothing is registered.",
)
REGISTRY_STORE_UP = Gauge("penstock_registry_store_up", "1 while the registry's store answers.")
REGISTRY_KEYS_AGE = Gauge(
    "penstock_registry_keys_age_seconds",
    "Time since the keys in use last matched the keys file. A key that was revoked since then is still valid.",
)
REGISTRY_KEYS_FAILURES = Counter(
    "penstock_registry_keys_load_failures", "Failed loads of the keys file by the registry. The log has the reason."
)

FLEET_EXPECTED = Gauge(
    "penstock_fleet_expected",
    "1 for each service that the fleet needs, by the pipe file and the settings ledger and schemas. A registry adds itself. "
    "pipe: for expel and transform, the pipe that needs them; else empty.",
    ["service", "pipe"],
)
SERVICE_READY = Gauge("penstock_service_ready", "1 while /readyz says that the process is ready, else 0.")
SERVICE_ALIVE = Gauge(
    "penstock_service_alive",
    "1 while /healthz is 200; 0: something in the process makes no progress, so it must be replaced.",
)
CLOCK = Gauge("penstock_clock_timestamp_seconds", "The clock of the process, for a comparison with that of Prometheus.")
DISK_FREE = Gauge(
    "penstock_disk_free_bytes",
    "Free bytes of the disk that has this data folder, for other users than root.",
    ["folder"],
)
DISK_SIZE = Gauge("penstock_disk_size_bytes", "Size of the disk that has this data folder.", ["folder"])
BUILD = Gauge(
    "penstock_build_info", "Always 1: which service this process is, and its version.", ["service", "version"]
)
FLEET_RESTARTS = Counter("penstock_fleet_restarts", "Processes that died and were restarted.", ["service"])
TABLE_REQUESTS = Counter("penstock_table_requests", "Requests answered by the table service, by status.", ["status"])
TABLE_RECORDS = Counter("penstock_table_records", "Records that were read from the stream into its table.", ["stream"])
TABLE_SKIPPED = Counter(
    "penstock_table_records_skipped",
    "Records of the stream that are no row: without a key, or damaged. The log has more about the latter.",
    ["stream", "reason"],
)
TABLE_REBUILDS = Counter(
    "penstock_table_rebuilds",
    "Times that a table was built again from the beginning of its stream, by reason. The log has the details.",
    ["stream", "reason"],
)
TABLE_REBUILT = Gauge(
    "penstock_table_rebuilt_timestamp_seconds", "When the table was last built again, by reason.", ["stream", "reason"]
)
TABLE_SNAPSHOTS = Counter(
    "penstock_table_snapshots",
    "Tables without a file that asked another replica for its copy, by result: used, or why not. The log has the details.",
    ["stream", "result"],
)
TABLE_READ_FAILURES = Counter(
    "penstock_table_read_failures", "Failed reads of the stream, by reason. They are repeated.", ["stream", "reason"]
)
TABLE_KEYS = Gauge("penstock_table_keys", "Keys in the table, as of the last minute.", ["stream"])
TABLE_BEHIND = Gauge(
    "penstock_table_behind_seconds", "Time since the table last had everything of its stream.", ["stream"]
)
TABLE_FOLLOWING = Gauge("penstock_table_following_clients", "Clients that follow changes.")
TABLE_CUT = Counter(
    "penstock_table_connections_cut_off", "Connections closed because of their client, by reason.", ["reason"]
)
TABLE_KEYS_AGE = Gauge(
    "penstock_table_keys_age_seconds",
    "Time since the API keys in use last matched the keys file. A key that was revoked since then is still valid.",
)
TABLE_KEYS_FAILURES = Counter(
    "penstock_table_keys_load_failures", "Failed loads of the keys file. The log has the reason."
)
LOG_RETENTION_BEHIND = Gauge(
    "penstock_log_retention_behind_seconds",
    "Embedded log: difference between the clock that retention uses and the system's clock, which is ahead.",
)
LOG_COMPACTED = Counter(
    "penstock_log_compacted_records",
    "Embedded log: records that compaction removed, because a newer one of their key or a tombstone replaced them.",
    ["topic"],
)
LOG_NOT_COMPACTED = Counter(
    "penstock_log_not_compacted",
    "Embedded log: passes over a partition of a compacted topic that failed, by reason. The other partitions are compacted.",
    ["topic", "reason"],
)
FLEET_LOG_LINES_LOST = Counter(
    "penstock_fleet_log_lines_lost", "Lines of a process that could not be written to its log file.", ["log"]
)

LAG_IN = LagFamily("penstock_lag_in_seconds", "Event time to arrival at the node.", ["pipe", "node"])
LAG_OUT = LagFamily("penstock_lag_out_seconds", "Event time to departure from the node.", ["pipe", "node"])
INGEST_TIME = LagFamily(
    "penstock_ingest_time_seconds", "Arrival of a request to its durable answer.", ["stream"], FINE_SECONDS
)
TRANSIT_TIME = LagFamily(
    "penstock_transit_time_seconds", "Arrival at ingest to arrival at expel.", ["pipe", "destination"]
)
EXPEL_TIME = LagFamily(
    "penstock_expel_time_seconds", "Arrival at expel to the receiver's 2xx.", ["pipe", "destination"], COARSE_SECONDS
)
E2E_LAG = LagFamily(
    "penstock_e2e_lag_seconds", "Arrival at ingest to the receiver's 2xx.", ["pipe", "destination"], COARSE_SECONDS
)
EVENT_LAG = LagFamily("penstock_event_lag_seconds", "Event time to the receiver's 2xx.", ["pipe", "destination"])
RETRIER_LATENESS = LagFamily(
    "penstock_retrier_lateness_seconds", "Due time of an event to its release to expel.", ["pipe"], FINE_SECONDS
)

LAG_FAMILIES = (LAG_IN, LAG_OUT, INGEST_TIME, TRANSIT_TIME, EXPEL_TIME, E2E_LAG, EVENT_LAG, RETRIER_LATENESS)
for family in LAG_FAMILIES:
    REGISTRY.register(family)
del family
