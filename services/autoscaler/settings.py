"""Settings of the autoscaler."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import AfterValidator, BeforeValidator, Field

from services.autoscaler.groups.drivers.open import check_driver
from services.autoscaler.groups.policy import GroupRules
from services.core.http.address import Address
from services.core.process.settings import Settings
from services.core.process.targets import check_targets
from services.core.units import Duration, Size

EXECUTORS = "executors"
"""The group of a transform's executors."""


def _read_groups(value: Any) -> Any:
    """Parse the groups of a flag or a variable, which are JSON."""
    try:
        return orjson.loads(value) if isinstance(value, str) else value
    except orjson.JSONDecodeError:
        raise ValueError('groups as JSON are needed. Try: {"expel": {"max": 4}}') from None


GroupName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class AutoscalerSettings(Settings):
    """Gives each stream the shards, and each service the instances, that its load needs."""

    section: ClassVar[str] = "autoscaler"

    targets: Annotated[str, AfterValidator(check_targets)] = Field(
        "data/fleet.json",
        description="The management addresses of the processes that write to streams: a file (Prometheus' file_sd, or a fleet's "
        "fleet.json) or dns://name:port, all addresses of that name; resolved each time.",
    )
    dry_run: bool = Field(False, description="Whether to log decisions without carrying them out (true or false).")
    stream_every: Duration = Field(15.0, ge=1, description="Time between two decisions about Kinesis streams.")
    partition_capacity: Size = Field(
        5_000_000,
        description="On Kafka: bytes per second that one partition handles; streams without keys get more when needed.",
    )
    groups: Annotated[Mapping[GroupName, GroupRules], BeforeValidator(_read_groups)] = Field(
        {},
        description="How each group is scaled, by its name; see docs/scaling-groups.md. In a flag or variable: JSON.",
    )
    group_driver: Annotated[str, AfterValidator(check_driver)] | None = Field(
        None,
        description="Where the groups run: fleet:///data, aws://region, kubernetes://namespace; required when there are groups "
        "beside `executors`.",
    )
    group_every: Duration = Field(15.0, ge=1, description="Time between two decisions about the groups.")
    transform: Address | None = Field(
        None,
        description="host:port of the management port of a transform service on a Spark cluster: its executors are the group "
        "`executors`.",
    )
    transform_token_file: Path | None = Field(
        None, description="A file with that transform's control token, not readable by others; required with transform."
    )
    observer: Address = Field("127.0.0.1:8081", description="host:port of the observer's API.")
    observer_token_file: Path | None = Field(
        None,
        description="A file with a token of the observer's token_file, not readable by others; without it nothing is announced.",
    )
