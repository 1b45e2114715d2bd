"""Twenty incidents and more: what happens, which alerts must fire within five minutes, and which check of `penstock doctor`
must name the cause in first place."""

import asyncio
import signal
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.core.broker.connect import open_broker
from services.core.jvm.jars import KAFKA_SERVER, jar_set
from services.core.jvm.java import find_java
from tests.faults.incident_fleet import IncidentFleet

Strike = Callable[[IncidentFleet], Awaitable[None]]
DISK_MB = 64


@dataclass(frozen=True, slots=True)
class Incident:
    """alerts: exactly those that must fire; may: and those that may. checks: names of the doctor's checks that name the cause.

    apart: services without a supervisor. autoscaler, table, registry: with one. small_disk: the folder that is on one, below the
    fleet's. change: the pipe file before the start.
    """

    name: str
    strike: Strike
    alerts: frozenset[str]
    checks: frozenset[str]
    may: frozenset[str] = frozenset()
    apart: bool = False
    spark: bool = False
    kafka: bool = False
    autoscaler: bool = False
    table: bool = False
    registry: bool = False
    small_disk: str = ""
    change: Strike | None = None


def _stop(service: str) -> Strike:
    """The service is drained and not started again, as when a Deployment has no replicas."""

    async def strike(fleet: IncidentFleet) -> None:
        fleet.signal(service, signal.SIGTERM)
        await fleet.services[service].wait_end()

    return strike


def _hang(service: str) -> Strike:
    async def strike(fleet: IncidentFleet) -> None:
        fleet.signal(service, signal.SIGSTOP)

    return strike


def _crash(service: str) -> Strike:
    """Each of its processes is killed within two seconds of its start."""

    async def strike(fleet: IncidentFleet) -> None:
        async def kill() -> None:
            while True:
                await asyncio.to_thread(fleet.signal, service, signal.SIGKILL)
                await asyncio.sleep(2)

        fleet.tasks.append(asyncio.create_task(kill()))

    return strike


async def _deploy_badly(fleet: IncidentFleet) -> None:
    """A pipe file with a mistake; the platform starts expel again and again."""
    fleet.signal("expel", signal.SIGTERM)
    await fleet.services["expel"].wait_end()
    fleet.pipes["pipes"]["shop"]["destinations"][0]["webhook"]["retry"] = {"attempts": "many"}
    fleet.write_pipes()

    async def start() -> None:
        while True:
            service = await fleet.start_service("expel")
            await service.wait_end()
            await asyncio.sleep(5)

    fleet.tasks.append(asyncio.create_task(start()))


async def _set_clock(fleet: IncidentFleet) -> None:
    fleet.signal("ingest", signal.SIGTERM)
    await fleet.services["ingest"].wait_end()
    service = await fleet.start_service("ingest", "tests.faults.wrong_clock")
    await service.wait_ready()


async def _stop_broker(fleet: IncidentFleet) -> None:
    assert fleet.cluster is not None
    await asyncio.to_thread(fleet.cluster.stop, grace_s=0)


async def _limit_broker(fleet: IncidentFleet) -> None:
    """An administrator gives every client of the cluster a quota of 300 bytes a second."""
    assert fleet.cluster is not None
    jars = ":".join(str(jar) for jar in jar_set(KAFKA_SERVER))
    command = [str(find_java().executable), "-cp", jars, "kafka.admin.ConfigCommand"]
    command += [
        "--bootstrap-server",
        fleet.cluster.bootstrap,
        "--alter",
        "--entity-type",
        "clients",
        "--entity-default",
    ]
    command += ["--add-config", "producer_byte_rate=300"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


async def _fill_disk(fleet: IncidentFleet) -> None:
    await asyncio.to_thread(_fill, fleet.data)


async def _fill_tables(fleet: IncidentFleet) -> None:
    await asyncio.to_thread(_fill, fleet.tables)


def _fill(folder: Path) -> None:
    with (folder / "other.file").open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            pass


async def _delete_topic(fleet: IncidentFleet) -> None:
    """Of the table, while the fleet runs."""
    async with open_broker(fleet.broker) as broker:
        await broker.admin.delete_topic("latest")


async def _lose_schemas(fleet: IncidentFleet) -> None:
    """As when the disk of the registry's store is not mounted any more."""
    await asyncio.to_thread(fleet.schemas.rename, fleet.folder / "unmounted")


async def _refuse(fleet: IncidentFleet) -> None:
    await fleet.crm.close()


def _answer(status: int) -> Strike:
    async def strike(fleet: IncidentFleet) -> None:
        fleet.crm.status = status

    return strike


async def _answer_nobody(fleet: IncidentFleet) -> None:
    fleet.crm.hangs = True


async def _refuse_everywhere(fleet: IncidentFleet) -> None:
    await fleet.crm.close()
    await fleet.archive.close()


def _webhook(fleet: IncidentFleet) -> dict[str, Any]:
    found: dict[str, Any] = fleet.pipes["pipes"]["shop"]["destinations"][0]["webhook"]
    return found


async def _with_secret(fleet: IncidentFleet) -> None:
    secret = fleet.folder / "crm.secret"
    secret.write_text("whsec_" + "A" * 32 + "\n")
    secret.chmod(0o600)
    _webhook(fleet)["secret"] = {"file": str(secret)}


async def _open_secret(fleet: IncidentFleet) -> None:
    """Somebody's chmod -R: everybody may read the secret now, so expel refuses to use the file."""
    (fleet.folder / "crm.secret").chmod(0o644)


async def _with_certificate(fleet: IncidentFleet) -> None:
    """The receiver has TLS, and wants to see a certificate."""
    for name in ("client", "server"):
        await asyncio.to_thread(_make_certificate, fleet.folder, name, "90")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(fleet.folder / "server.pem", fleet.folder / "server.key")
    await fleet.crm.close()
    await fleet.crm.open(context)
    files = {"ca": "server.pem", "certificate": "client.pem", "key": "client.key"}
    _webhook(fleet)["tls"] = {name: str(fleet.folder / file) for name, file in files.items()}
    _webhook(fleet)["url"] = f"https://localhost:{fleet.crm.port}/hook"


async def _expire_certificate(fleet: IncidentFleet) -> None:
    """Nobody has renewed it."""
    await asyncio.to_thread(_make_certificate, fleet.folder, "client", "-1")


def _make_certificate(folder: Path, name: str, days: str) -> None:
    """With itself as its authority, and its key."""
    request = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    request += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    request += ["-keyout", str(folder / "new.key"), "-out", str(folder / "new.csr")]
    subprocess.run(request, check=True, capture_output=True)
    sign = ["openssl", "x509", "-req", "-in", str(folder / "new.csr"), "-signkey", str(folder / "new.key")]
    sign += ["-copy_extensions", "copy", "-days", days, "-out", str(folder / "new.pem")]
    subprocess.run(sign, check=True, capture_output=True)
    for kind in ("key", "pem"):
        (folder / f"new.{kind}").chmod(0o600)
        (folder / f"new.{kind}").rename(folder / f"{name}.{kind}")


async def _with_python(fleet: IncidentFleet) -> None:
    """A transform whose Python ends its process at an amount of -1."""
    code = (
        "import os\n"
        "from pyspark.sql import DataFrame, functions as F\n"
        "from pyspark.sql.types import DoubleType\n\n\n"
        "def check(amount: float) -> float:\n"
        "    if amount == -1:\n"
        "        os._exit(1)\n"
        "    return amount\n\n\n"
        "def transform(orders: DataFrame) -> DataFrame:\n"
        "    return orders.withColumn('amount', F.udf(check, DoubleType())('amount'))\n"
    )
    (fleet.folder / "large.py").write_text(code)
    fleet.pipes["pipes"]["large"]["transform"] = {"python": "large.py:transform"}


async def _poison(fleet: IncidentFleet) -> None:
    """One event in a batch."""
    fleet.poison = {"amount": -1}
    sent = fleet.sent
    while fleet.sent == sent:
        await asyncio.sleep(0.01)
    fleet.poison = {}


async def _lose_checkpoint(fleet: IncidentFleet) -> None:
    """Somebody tidies up the disk of a running transform."""
    offsets = fleet.data / "checkpoints" / "large" / "offsets"
    await asyncio.to_thread(
        offsets.rename, fleet.folder / "tidied"
    )  # at once: a batch that begins meanwhile would bring it back
    await asyncio.sleep(1)
    await asyncio.to_thread(fleet.signal, "transform", signal.SIGKILL)


async def _kill_supervisor(fleet: IncidentFleet) -> None:
    assert fleet.up is not None
    await asyncio.to_thread(fleet.up.kill)


def _of(*names: str) -> frozenset[str]:
    return frozenset(f"Penstock{name}" for name in names)


DOWN, HUNG, LOOP = (
    _of("ComponentDown"),
    _of("ComponentDown", "ProcessDown"),
    _of("CrashLoop", "ComponentDown", "ProcessRestarts"),
)
SIZES_STAY = _of("AutoscalerDown")
HEALED = frozenset({""})
"""The doctor finds nothing wrong any more."""
DEAD = frozenset({"processes-dead"})
DESTINATION, FAILING = _of("DestinationDown"), frozenset({"receivers-fail"})
INCIDENTS: tuple[Incident, ...] = (
    Incident("ingest stopped", _stop("ingest"), DOWN, DEAD, apart=True),
    Incident("expel stopped", _stop("expel"), DOWN, DEAD, apart=True),
    Incident("retrier stopped", _stop("retrier"), DOWN, DEAD, apart=True),
    Incident("observer gone", _stop("observer"), DOWN, DEAD, apart=True),
    Incident("transform stopped", _stop("transform"), DOWN, DEAD, apart=True, spark=True),
    Incident("ingest hangs", _hang("ingest"), HUNG, frozenset({"processes-hung"}), apart=True),
    Incident("expel hangs", _hang("expel"), HUNG, frozenset({"processes-hung"}), apart=True),
    Incident("retrier hangs", _hang("retrier"), HUNG, frozenset({"processes-hung"}), apart=True),
    Incident("observer hangs", _hang("observer"), HUNG, frozenset({"processes-hung"}), apart=True),
    Incident("transform hangs", _hang("transform"), HUNG, frozenset({"processes-hung"}), apart=True, spark=True),
    Incident("ingest is started again", _hang("ingest"), frozenset(), HEALED),
    Incident("expel is started again", _hang("expel"), frozenset(), HEALED),
    Incident("expel crash-loops", _crash("expel"), LOOP, frozenset({"crash-loops"})),
    Incident("observer crash-loops", _crash("observer"), LOOP, frozenset({"crash-loops"})),
    Incident("ingest crash-loops", _crash("ingest"), LOOP, frozenset({"crash-loops"})),
    Incident("retrier crash-loops", _crash("retrier"), LOOP, frozenset({"crash-loops"})),
    Incident("transform crash-loops", _crash("transform"), LOOP, frozenset({"crash-loops"}), spark=True),
    Incident(
        "autoscaler stopped",
        _stop("autoscaler"),
        SIZES_STAY,
        frozenset({"autoscaler-away"}),
        apart=True,
        autoscaler=True,
    ),
    Incident(
        "autoscaler hangs",
        _hang("autoscaler"),
        SIZES_STAY | _of("ProcessDown"),
        frozenset({"processes-hung"}),
        apart=True,
        autoscaler=True,
    ),
    Incident(
        "autoscaler crash-loops",
        _crash("autoscaler"),
        _of("ProcessRestarts"),
        frozenset({"crash-loops"}),
        may=SIZES_STAY,  # a run of two seconds may answer Prometheus in time
        autoscaler=True,
    ),
    Incident("wrong deploy", _deploy_badly, DOWN, frozenset({"configuration"}), apart=True),
    Incident("fleet killed", _kill_supervisor, _of("NotScraped", "ProcessDown"), frozenset({"fleet-down"})),
    Incident(
        "broker gone",
        _stop_broker,
        _of("IngestRefuses", "IngestNotReady", "NotReady", "TelemetryFails"),
        frozenset({"broker-gone"}),
        kafka=True,
    ),
    Incident(
        "quota",
        _limit_broker,
        _of("BrokerQuota"),
        frozenset({"throttled"}),
        may=_of("IngestNotReady", "TelemetryFails"),  # it depends on which appends the quota holds up
        kafka=True,
    ),
    Incident(
        "disk full",
        _fill_disk,
        _of("DiskFull", "IngestRefuses", "IngestNotReady", "NotReady"),
        frozenset({"disk-full"}),
        may=_of("TelemetryFails"),  # reports are not stored either; it fires after about 300 s
        small_disk="data",
    ),
    Incident("table stopped", _stop("table"), DOWN, DEAD, apart=True, table=True),
    Incident("table hangs", _hang("table"), HUNG, frozenset({"processes-hung"}), apart=True, table=True),
    Incident("table crash-loops", _crash("table"), LOOP, frozenset({"crash-loops"}), table=True),
    Incident(
        "disk of the tables full",
        _fill_tables,
        _of("DiskFull", "StreamTableStuck", "NotReady"),
        frozenset({"disk-full"}),
        may=_of("StreamTableBehind"),  # it fires after about 310 s
        apart=True,
        table=True,
        small_disk="tables",
    ),
    Incident(
        "topic of a table deleted",
        _delete_topic,
        _of("IngestRefuses", "IngestNotReady", "StreamTableStuck", "NotReady"),
        frozenset({"topics-missing"}),
        may=_of("StreamTableBehind"),
        table=True,
    ),
    Incident("registry stopped", _stop("registry"), DOWN, DEAD, apart=True, registry=True),
    Incident("registry hangs", _hang("registry"), HUNG, frozenset({"processes-hung"}), apart=True, registry=True),
    Incident("registry crash-loops", _crash("registry"), LOOP, frozenset({"crash-loops"}), registry=True),
    Incident(
        "store of schemas away",
        _lose_schemas,
        _of("SchemaStoreAway"),
        frozenset({"schema-store-away"}),
        registry=True,
    ),
    Incident("clock wrong", _set_clock, _of("ClockWrong"), frozenset({"clock"}), apart=True),
    Incident("receiver refuses connections", _refuse, DESTINATION, FAILING | {"receiver-gone"}),
    Incident("receiver answers 503", _answer(503), DESTINATION, FAILING),
    Incident("receiver answers nobody", _answer_nobody, DESTINATION, FAILING),
    Incident(
        "every receiver refuses",
        _refuse_everywhere,
        DESTINATION | _of("EveryDestinationDown"),
        frozenset({"every-receiver"}),
    ),
    Incident("receiver answers 400", _answer(400), _of("DeadLettersGrow"), FAILING | {"dead-letters"}),
    Incident(
        "certificate expired",
        _expire_certificate,
        _of("CertificateExpired"),
        frozenset({"certificate-expired"}),
        change=_with_certificate,
    ),
    Incident(
        "secret readable by everybody", _open_secret, _of("SecretsStale"), frozenset({"secrets"}), change=_with_secret
    ),
    Incident(
        "poisoned batch",
        _poison,
        _of("TransformDeadLettersGrow"),
        frozenset({"transform-poison"}),
        spark=True,
        change=_with_python,
    ),
    Incident(
        "lost checkpoint",
        _lose_checkpoint,
        _of("TransformFails", "CrashLoop", "ProcessRestarts"),
        frozenset({"checkpoint"}),
        may=_of("TransformNotUp"),  # when it dies slowly
        spark=True,
    ),
)
