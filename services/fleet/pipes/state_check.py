"""Whether changed transforms can use the state that the former ones left: asked of Spark before anything starts."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from services.core.pipe_file.state_plan import StateCheck, StatePlan
from services.core.temporary import temporary_folder
from services.core.yaml_source import BadConfiguration
from services.fleet.pipes.changes import Change
from services.fleet.pipes.spark_child import LIMIT_S, TooSlow, run_spark
from services.fleet.problem import CommandFailed


def check_states(pipes: Path, states: Mapping[str, StatePlan], broker: str | None = None) -> list[Change]:
    """A line for each pipe: it continues with its state, or that is not known. Blocking, where there are states: Spark starts
    in about six seconds.

    states: as in `Changes`. broker: for the size limit of records. Raises BadConfiguration with a problem for each transform that
    cannot use its state, or has a mistake.
    """
    if not states:
        return []
    with temporary_folder("state") as scratch:
        (scratch / "former").write_bytes(msgspec.msgpack.encode(states))
        arguments: list[str | Path] = ["--pipes", pipes, "--only", ",".join(sorted(states)), "--data", scratch]
        arguments += ["--former", scratch / "former", "--result", scratch / "result"]
        arguments += ["--broker", broker] if broker is not None else []
        try:
            run_spark("spark.state_check", arguments, scratch, "penstock doctor")
            found = msgspec.msgpack.decode((scratch / "result").read_bytes(), type=StateCheck)
        except TooSlow:
            found = StateCheck(failed=f"Spark gave no answer within {LIMIT_S / 60:.0f} minutes")
        except CommandFailed as error:
            found = StateCheck(failed=str(error))
    if found.problems:
        raise BadConfiguration(found.problems)
    if not found.failed:
        words = "changed transform, continues with the state that the former one left (open windows, joins)"
        return [Change("transform", name, words) for name in sorted(states)]
    words = "changed transform; whether it can use the state of the former one is not known until it starts"
    return [Change("transform", name, f"{words}: {found.failed}") for name in sorted(states)]
