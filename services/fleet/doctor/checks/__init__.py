"""All checks, in causal order: a cause before its consequences. The first finding is the most probable cause.

A new check is a function in the file of its subject here and a `Check` in the list below. Its facts are fields of `facts.py`,
which a collector fills. Its runbook is a page of docs/runbooks. The names of the checks that it explains go into `explains`.
"""

from services.fleet.doctor.checks import (
    broker,
    events,
    expiry,
    ledger,
    machine,
    processes,
    receivers,
    scaling,
    tables,
    transforms,
)
from services.fleet.doctor.diagnosis import Check

_PROCESSES = ("processes-dead", "processes-hung", "crash-loops", "processes-not-ready", "processes-restarted")
_FLOW = (
    "ingest-refuses",
    "reports-not-stored",
    "lanes-down",
    "pipe-unserved",
    "retrier-down",
    "retrier-stuck",
    "transform-down",
    "transform-stuck",
    "transform-fails",
    "table-behind",
    "stalled",
    "retention",
)
_JUDGED = ("observer-away", "nobody-speaks", "letters-unread", "minutes-open", "loss")
_SENT = ("tokens-refused", "every-receiver", "receivers-fail")
_ALL = frozenset((*_PROCESSES, *_FLOW, *_JUDGED, *_SENT, "topics-missing"))
"""Not dead letters: events of a fleet or a broker that does not work wait, and none of them is given up."""
_OF_RECEIVER = frozenset(
    (
        *_SENT,
        "dead-letters",
        "stalled",
        "retention",
        "processes-not-ready",
        "lanes-down",
        "retrier-down",
        "minutes-open",
    )
)
_OF_TRANSFORM = frozenset(
    (
        "transform-poison",
        "transform-down",
        "transform-stuck",
        "transform-fails",
        "processes-not-ready",
        "crash-loops",
        "stalled",
        "loss",
        "retention",
        "minutes-open",
    )
)
_OF_QUOTA = frozenset(
    (
        "ingest-refuses",
        "stalled",
        "processes-not-ready",
        "lanes-down",
        "reports-not-stored",
        "retention",
        "retrier-down",
        "retrier-stuck",
        *_JUDGED[:-1],
    )
)
_OF_CLOCK = frozenset(
    (
        "login-expired",
        "certificate-expired",
        "token-expired",
        "loss",
        "retention",
        "retrier-stuck",
        "minutes-open",
        "autoscaler-away",
    )
)
_OF_PROCESS = frozenset((*_FLOW, *_JUDGED, *_PROCESSES, *_SENT, "secrets", "autoscaler-away", "instances-missing"))

CHECKS = (
    Check("data-folder", "PenstockIngestNotReady", machine.find_folder, _ALL | {"broker-gone", "fleet-down"}),
    Check("disk-full", "PenstockDiskFull", machine.find_full_disk, _ALL | {"broker-gone", "fleet-down", "secrets"}),
    Check("clock", "PenstockClockWrong", machine.find_wrong_clock, _OF_CLOCK),
    Check("versions", "PenstockProcessRestarts", processes.find_versions, _OF_PROCESS),
    Check(
        "configuration", "PenstockCrashLoop", processes.find_bad_configuration, _OF_PROCESS | {"edited", "fleet-down"}
    ),
    Check("fleet-down", "PenstockNotScraped", processes.find_no_fleet, _ALL | {"broker-gone", "edited"}),
    Check(
        "login-expired",
        "PenstockCertificateExpired",
        expiry.find_expired_login,
        _ALL | {"broker-gone", "access-refused", "secrets"},
    ),
    Check("broker-gone", "PenstockIngestNotReady", broker.find_gone, _ALL | {"access-refused", "secrets"}),
    Check("access-refused", "PenstockBrokerAccessRefused", broker.find_refused_access, frozenset(_PROCESSES)),
    Check("broker-silent", "PenstockIngestNotReady", broker.find_silent, _OF_RECEIVER | {"ingest-refuses"}),
    Check("topics-missing", "PenstockIngestNotReady", broker.find_missing_topics, _ALL),
    Check("broker-damage", "PenstockRecordsDamaged", broker.find_damage, _ALL | {"dead-letters"}),
    Check("checkpoint", "PenstockTransformNotUp", transforms.find_checkpoints, _OF_TRANSFORM),
    Check("processes-hung", "PenstockProcessDown", processes.find_hung, _OF_PROCESS),
    Check("supervisor-hung", "PenstockProcessDown", processes.find_hung_supervisor, frozenset(("processes-dead",))),
    Check("crash-loops", "PenstockCrashLoop", processes.find_crash_loops, _OF_PROCESS),
    Check("processes-dead", "PenstockComponentDown", processes.find_dead, _OF_PROCESS),
    Check("secrets", "PenstockSecretsStale", receivers.find_secrets, _OF_RECEIVER),
    Check("certificate-expired", "PenstockCertificateExpired", expiry.find_expired, _OF_RECEIVER),
    Check("token-expired", "PenstockTokenExpired", expiry.find_expired_tokens, _OF_RECEIVER),
    Check("receiver-gone", "PenstockPaused", receivers.find_gone, _OF_RECEIVER),
    Check("tokens-refused", "PenstockTokenRefused", receivers.find_refused_tokens, _OF_RECEIVER),
    Check("records-missing", "PenstockRecordsMissing", broker.find_missing_records, _OF_RECEIVER),
    Check("every-receiver", "PenstockEveryDestinationDown", receivers.find_every, _OF_RECEIVER),
    Check("receivers-fail", "PenstockDestinationDown", receivers.find_failing, _OF_RECEIVER),
    Check("quota", "PenstockClientsRefused", events.find_quota),
    Check("throttled", "PenstockBrokerThrottles", broker.find_throttled, _OF_QUOTA),
    Check(
        "transform-poison",
        "PenstockTransformDeadLettersGrow",
        transforms.find_poison,
        _OF_TRANSFORM - {"transform-poison"},
    ),
    Check("transform-down", "PenstockTransformNotUp", transforms.find_down, _OF_TRANSFORM),
    Check(
        "transform-stuck",
        "PenstockTransformStuck",
        transforms.find_stuck,
        frozenset(("transform-fails", "stalled", "retention", "loss", "minutes-open")),
    ),
    Check("transform-fails", "PenstockTransformFails", transforms.find_failing, frozenset(("loss", "minutes-open"))),
    Check(
        "reports-not-stored",
        "PenstockTelemetryFails",
        events.find_unreported,
        frozenset(("stalled", "loss", "minutes-open")),
    ),
    Check("ingest-refuses", "PenstockIngestNotReady", events.find_refused, frozenset(("processes-not-ready",))),
    Check("unclaimed", "PenstockEventsUnclaimed", events.find_unclaimed),
    Check("dead-letters", "PenstockDeadLettersGrow", events.find_letters),
    Check("paused", "PenstockPaused", receivers.find_paused, frozenset(("stalled", "retention", "transform-stuck"))),
    Check(
        "lanes-down", "PenstockLaneNotUp", events.find_lanes_down, frozenset(("stalled", "retention", "minutes-open"))
    ),
    Check(
        "pipe-unserved",
        "PenstockPipeUnserved",
        events.find_unserved,
        frozenset(("stalled", "retention", "loss", "minutes-open")),
    ),
    Check(
        "retrier-down",
        "PenstockRetrierNotUp",
        events.find_retrier_down,
        frozenset(("processes-not-ready", "retrier-stuck", "loss", "minutes-open")),
    ),
    Check("retrier-stuck", "PenstockRetrierStuck", events.find_retrier_stuck, frozenset(("loss",))),
    Check(
        "table-rebuilt",
        "PenstockStreamTableRebuilt",
        tables.find_rebuilt,
        frozenset(("table-behind", "processes-not-ready")),
    ),
    Check("table-behind", "PenstockStreamTableBehind", tables.find_behind, frozenset(("processes-not-ready",))),
    Check("processes-not-ready", "PenstockNotReady", processes.find_unready, frozenset((*_FLOW, *_JUDGED))),
    Check("stalled", "PenstockLaneStuck", events.find_stalled, frozenset(("retention", "minutes-open"))),
    Check("retention", "PenstockLagOld", broker.find_retention),
    Check("observer-away", "PenstockComponentDown", events.find_observer, frozenset(_JUDGED)),
    Check("loss", "PenstockLoss", events.find_loss, frozenset(("minutes-open",))),
    Check("minutes-unjudged", "PenstockMinutesUnjudged", ledger.find_unjudged),
    Check("minutes-open", "PenstockMinutesStayOpen", ledger.find_open_minutes),
    Check("nobody-speaks", "PenstockNobodySpeaks", ledger.find_no_speaker),
    Check("letters-unread", "PenstockLettersUnread", ledger.find_unread_letters),
    Check("alarms-untold", "PenstockAlarmsUntold", ledger.find_untold),
    Check("reports-gone", "PenstockReportsGone", ledger.find_gone_reports),
    Check("table-old", "PenstockTableOld", transforms.find_old_tables),
    Check("table-clients-cut", "PenstockStreamTableClientsCut", tables.find_cut),
    Check("schemas-damaged", "PenstockSchemasDamaged", processes.find_damaged_schemas),
    Check(
        "schema-store-away", "PenstockSchemaStoreAway", processes.find_schema_store, frozenset(("processes-not-ready",))
    ),
    Check("disk-nearly-full", "PenstockDiskFills", machine.find_little_room),
    Check("certificate-expires", "PenstockCertificateExpires", expiry.find_expiring),
    Check("token-expires", "PenstockTokenExpires", expiry.find_expiring_tokens),
    Check("secret-expires", "PenstockSecretExpires", expiry.find_expiring_secrets),
    Check("secret-old", "PenstockSecretExpires", expiry.find_old_secrets),
    Check("autoscaler-away", "PenstockAutoscalerDown", scaling.find_away),
    Check("autoscaler-fails", "PenstockAutoscalerFails", scaling.find_failures),
    Check("streams-at-limit", "PenstockStreamAtLimit", scaling.find_full_streams),
    Check("groups-at-limit", "PenstockAutoscalerAtLimit", scaling.find_full_groups),
    Check("instances-missing", "PenstockInstancesMissing", scaling.find_missing),
    Check("fields-absent", "PenstockDrift", events.find_absent_fields),
    Check("drift", "PenstockDrift", ledger.find_drifts),
    Check("edited", "PenstockProcessRestarts", events.find_edited),
    Check("processes-restarted", "PenstockProcessRestarts", processes.find_restarted),
)
