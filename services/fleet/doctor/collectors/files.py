"""Looks at the files of a fleet on this machine: disks, the data folder, secrets, certificates, the snapshot, checkpoints."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from services.core.broker.connect import parse_kafka_url
from services.core.broker.errors import BrokerError
from services.core.broker.log.blocking import first_stored
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.snapshot import list_copies, original_of
from services.core.pipe_file.topic_names import lane_name, output_topic
from services.core.pipe_file.webhook import Tls, Webhook
from services.core.security.bearer import read_tokens
from services.core.security.credentials import BadCredential, find_secret, read_tls, read_value
from services.core.security.expiry import untils_of_pem
from services.core.security.kafka import load_security
from services.core.security.keys import load_keys
from services.core.security.signing import BadSecret, read_signing_keys
from services.core.yaml_source import BadConfiguration
from services.fleet.doctor.diagnosis import about
from services.fleet.doctor.facts import Certificate, Checkpoint, Disk, Facts, FileFault
from services.fleet.folder import OBSERVER_TOKEN_FILE, SNAPSHOT, find_checkpoints


def collect_disks(facts: Facts) -> None:
    """Every file system that holds files of the fleet, once. Blocking."""
    assert facts.data is not None
    kind, _, path = facts.broker.url.partition("://")
    folders = [facts.data, *(facts.data / name for name in ("log", "logs", "checkpoints", "kafka"))]
    if kind == "log":
        folders.append(Path(path))
    found: dict[int, Disk] = {}
    for folder in folders:
        try:
            device, usage = folder.stat().st_dev, os.statvfs(folder)
        except FileNotFoundError:
            continue
        free, size = usage.f_bavail * usage.f_frsize, usage.f_blocks * usage.f_frsize
        files = usage.f_favail if usage.f_files else -1
        found.setdefault(device, Disk(folder, free, size, files, bool(usage.f_flag & os.ST_RDONLY)))
    facts.disks = tuple(found.values())


def collect_folder(facts: Facts) -> None:
    """Whether the data folder and the log in it are there and can be used. Blocking."""
    assert facts.data is not None
    kind, _, path = facts.broker.url.partition("://")
    wanted = [facts.data, *([Path(path), Path(path) / "topics"] if kind == "log" else [])]
    for folder in wanted:
        if not folder.is_dir():
            facts.folder = f"{folder} is not there"
        elif not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            facts.folder = f"this user may not read and write {folder}"
        else:
            continue
        return


def collect_secrets(facts: Facts) -> None:
    """Every file with a secret, a key or a certificate. Values in variables are known to the services alone. Blocking."""
    assert facts.pipes is not None
    folder = _folder_of(facts)
    faults: list[FileFault] = []
    certificates: list[Certificate] = []
    for lane, webhook in webhooks_of(facts.pipes):
        faults += _bad_secrets(lane, webhook, folder)
        for word, tls in _tls_of(webhook):
            try:
                read_tls(tls, folder)
            except BadCredential as error:
                faults.append(
                    FileFault(f"{word} of {lane}", str(tls.certificate or tls.ca), str(error), about(lane, "expel"))
                )
            certificates += _certificates_of(lane, word, tls, folder)
    if facts.state is not None and facts.state.keys is not None:
        faults += _bad_keys(Path(facts.state.keys))
    if facts.data is not None and (token := facts.data / OBSERVER_TOKEN_FILE).exists():
        try:
            read_tokens(token)
        except BadConfiguration as error:
            faults.append(FileFault("the observer's tokens", str(token), str(error.problems[0]), about("observer")))
    faults += _kafka_faults(facts, certificates)
    facts.files = tuple(faults)
    facts.certificates = tuple(certificates)


def _kafka_faults(facts: Facts, certificates: list[Certificate]) -> Iterator[FileFault]:
    """Of the file that `?security=` names. Its certificates are added. Variables are known to the services alone."""
    path = None
    with suppress(ValueError):  # the collector of the broker says what is wrong with the URL
        path = parse_kafka_url(facts.broker.url).security if facts.broker.url.startswith("kafka://") else None
    if path is None:
        return
    try:
        security = load_security(path)
        secret = None if security.sasl is None else security.sasl.secret
        if secret is not None and secret.file is not None:
            read_value(secret, path.parent, {})
        if security.files is not None:
            certificates += _certificates_of(None, "tls", security.files, path.parent)
            read_tls(security.files, path.parent, http=False)
    except (BadConfiguration, BadCredential) as error:
        yield FileFault("the file of the way to Kafka (?security=)", str(path), str(error))


def webhooks_of(pipes: PipeFile) -> Iterator[tuple[str, Webhook]]:
    """Every webhook, with the name of its lane."""
    for name, pipe in pipes.pipes.items():
        for destination in pipe.destinations:
            if destination.webhook is not None:
                yield lane_name(name, destination.name), destination.webhook


def _folder_of(facts: Facts) -> Path:
    """The folder to which the paths in the pipe file are relative."""
    assert facts.pipes_path is not None
    return (original_of(facts.pipes_path) or facts.pipes_path).parent


def _bad_secrets(lane: str, webhook: Webhook, folder: Path) -> Iterator[FileFault]:
    if webhook.secret is not None and webhook.secret.file is not None:
        try:
            read_signing_keys(webhook.secret, folder, {})
        except BadSecret as error:
            path = str(folder / webhook.secret.file)
            yield FileFault(f"the signing secret of {lane}", path, str(error), about(lane, "expel"))
    place = find_secret(webhook)
    if place is not None and place[1].file is not None:
        _, secret, is_token = place
        try:
            read_value(secret, folder, {}, token=is_token)
        except BadCredential as error:
            path = str(folder / str(secret.file))
            yield FileFault(f"the credential of {lane}", path, str(error), about(lane, "expel"))


def _tls_of(webhook: Webhook) -> Iterator[tuple[str, Tls]]:
    if webhook.tls is not None:
        yield "tls", webhook.tls
    if webhook.auth is not None and webhook.auth.oauth is not None and webhook.auth.oauth.tls is not None:
        yield "the token server's tls", webhook.auth.oauth.tls


def _certificates_of(lane: str | None, word: str, tls: Tls, folder: Path) -> Iterator[Certificate]:
    """lane: None for the way to Kafka."""
    for name, file in (("our client certificate", tls.certificate), ("the CA certificate", tls.ca)):
        if file is None:
            continue
        path = folder / file
        try:
            untils = untils_of_pem(path.read_bytes())
        except (OSError, ValueError):
            continue  # read_tls has said what is wrong
        if untils:  # the first one of ours is shown to receivers; of several authorities one is enough
            until = untils[0] if file == tls.certificate else max(untils)
            yield Certificate(f"{name} for {lane or 'Kafka'} ({word})", until, () if lane is None else (lane,), path)


def _bad_keys(path: Path) -> Iterator[FileFault]:
    try:
        load_keys(path)
    except BadConfiguration as error:
        yield FileFault("the API keys of ingest", str(path), str(error.problems[0]), about("ingest"))


def collect_snapshot(facts: Facts) -> None:
    """The configuration files that differ from those with which the fleet was started. Blocking. Raises OSError."""
    assert facts.data is not None
    folder = facts.data / SNAPSHOT
    try:
        copies = list_copies(folder)
    except FileNotFoundError:
        return
    changed = []
    for original, copy in copies.items():
        ours = copy.read_bytes()
        try:
            theirs = Path(original).read_bytes()
        except OSError as error:
            changed.append(f"{original}: {error.strerror}; the fleet runs with {copy}")
            continue
        if ours != theirs:
            changed.append(f"diff {copy} {original}: {_first_difference(ours, theirs)}")
    facts.changed = tuple(changed)


def _first_difference(ours: bytes, theirs: bytes) -> str:
    """The first line that differs."""
    mine, yours = ours.decode(errors="replace").splitlines(), theirs.decode(errors="replace").splitlines()
    pairs = zip([*mine, ""], [*yours, ""], strict=False)
    number = next((at for at, (one, other) in enumerate(pairs, 1) if one != other), 0)
    return f"the first difference is in line {number}" if number else "they differ in the ends of lines"


def collect_checkpoints(facts: Facts) -> None:
    """The checkpoint of each transform. Of those in S3 only the service knows. Blocking."""
    assert facts.data is not None
    assert facts.pipes is not None
    root = find_checkpoints(facts.data)
    if isinstance(root, str):
        return
    found = []
    for name, pipe in facts.pipes.pipes.items():
        if pipe.transform is None:
            continue
        path = root / name
        try:
            made: float | None = (path / "metadata").stat().st_mtime
        except OSError:
            made = None
        asides = list(path.parent.glob(f"{name}.*")) if path.parent.is_dir() else []
        has_identity = (path / "penstock.json").exists()
        found.append(Checkpoint(name, path, made, _first_result(facts, name), bool(asides), has_identity))
    facts.checkpoints = tuple(found)


def _first_result(facts: Facts, pipe: str) -> float | None:
    """When the oldest result that the log has was stored."""
    kind, _, root = facts.broker.url.partition("://")
    try:
        return first_stored(root, output_topic(pipe)) if kind == "log" and Path(root).is_dir() else None
    except BrokerError:  # the broker's own checks say what is wrong with it
        return None
