"""The keys file: YAML, not readable by others, written by `penstock keys` and read by ingest.

    version: 1
    keys:
      - id: k3v9x0qa
        hash: <SHA-256 of the secret, 64 hexadecimal digits>
        name: the orders service
        streams: [orders]                # or ["*"] for every stream
        scopes: [ingest]
        rate: 1000                       # events a second at most, per ingest process; absent: no quota
        created: '2026-01-02T03:04:05Z'
        revoked: '2026-02-03T04:05:06Z'  # only when revoked

Everything here blocks.
"""

import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.core.keys import ApiKey
from services.core.validation import validate_document
from services.core.yaml_source import BadConfiguration, Problem, load_yaml


class KeyFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    keys: list[ApiKey] = Field(default_factory=list)

    @model_validator(mode="after")
    def _ids_differ(self) -> Self:
        if len({key.id for key in self.keys}) != len(self.keys):
            raise ValueError("two keys have the same id")
        return self


def load_keys(path: Path) -> list[ApiKey]:
    """All keys, the revoked ones too. Raises BadConfiguration, also when others may read or write the file."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        problem = Problem(str(path), "", f"cannot be read: {error.strerror}. Try: penstock keys create")
        raise BadConfiguration([problem]) from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise BadConfiguration([Problem(str(path), "", f"others can read or write it. Try: chmod 600 {path}")])
    document = load_yaml(path)
    if document.data is None:  # it is being written, or was cut off: not that every key was revoked
        raise BadConfiguration([Problem(str(path), "", "is empty. Try: keys: []")])
    return validate_document(document, KeyFile).keys


def add_key(path: Path, entry: ApiKey) -> None:
    """Append one key; makes the file (mode 600) when there is none. Raises BadConfiguration, OSError."""
    _change(path, lambda keys: [*keys, entry])


def revoke_key(path: Path, key_id: str, revoked: str) -> bool:
    """Mark a key as revoked at this time (RFC 3339); False when there is none with this id. Raises BadConfiguration, OSError."""
    found = False

    def mark(keys: Sequence[ApiKey]) -> list[ApiKey]:
        nonlocal found
        found = any(key.id == key_id for key in keys)
        return [key.model_copy(update={"revoked": key.revoked or revoked}) if key.id == key_id else key for key in keys]

    _change(path, mark)
    return found


def _change(path: Path, change: Callable[[Sequence[ApiKey]], list[ApiKey]]) -> None:
    """Read, change and replace the file under a lock beside it, so that two changes at once both count."""
    lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = load_keys(path) if path.exists() else []
        _replace(path, KeyFile(keys=change(keys)))
    finally:
        os.close(lock)


def _replace(path: Path, content: KeyFile) -> None:
    """Readers see the old file or the new one, never a part: written beside it, synced, renamed."""
    text = yaml.safe_dump(content.model_dump(exclude_none=True), sort_keys=False)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
