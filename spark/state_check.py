"""`python -m spark.state_check`: whether changed transforms can use the state that the former ones left.

The command line runs it. It analyses transforms of the pipe file, and runs nothing.
"""

import os
import sys
from pathlib import Path

import msgspec
from pydantic import Field

from services.core.jvm.jars import JarsUnavailable
from services.core.jvm.java import JavaNotFound
from services.core.pipe_file.state_plan import StateCheck, StatePlan
from services.core.process.lifecycle import configure_logs, report_bad_configuration
from services.core.process.settings import load_settings
from services.core.sample import PHASE
from services.core.yaml_source import BadConfiguration
from spark.brokers.contract import open_spark_broker
from spark.errors import shorten
from spark.jobs.start_checks import refuse_plan
from spark.session import open_session
from spark.settings import TransformSettings, load_pipes
from spark.transforms.preparation import prepare_pipes


class StateCheckSettings(TransformSettings):
    """Compares transforms (`only`) with the state of the former ones. `data` is a folder for scratch."""

    former: Path = Field(Path("former"), description="By pipe, the `StatePlan` of the former transform, msgpack.")
    result: Path = Field(Path("result"), description="The file to write: a `StateCheck`, msgpack.")

    @classmethod
    def program(cls) -> str:
        return "python -m spark.state_check"


def check_state(settings: StateCheckSettings) -> StateCheck:
    """Start Spark and compare. Blocking. Every failure is in the result."""
    try:
        former = msgspec.msgpack.decode(settings.former.read_bytes(), type=dict[str, StatePlan])
        chosen = load_pipes(settings)
        broker = open_spark_broker(settings.broker, chosen.file)
        scratch = settings.data.absolute()
        session = open_session(
            master="local[1]",
            memory=settings.memory,
            kafka=False,
            scratch=scratch,
            compiler="quick",
            on_phase=(scratch / PHASE).write_text,
        )
        problems = []
        for prepared in prepare_pipes(session, chosen, max_bytes=broker.max_record_bytes):
            if reason := refuse_plan(prepared, former[prepared.pipe]):
                key = ("pipes", prepared.pipe, "transform", "python" if prepared.transform.sql is None else "sql")
                problems.append(chosen.document.problem(key, reason))
        return StateCheck(problems)
    except BadConfiguration as error:
        return StateCheck(error.problems)
    except (JavaNotFound, JarsUnavailable) as error:
        return StateCheck(failed=str(error))
    except Exception as error:
        return StateCheck(failed=f"Spark failed: {type(error).__name__}: {shorten(error)}")


def main() -> int:
    """Exit status: 0 the result is written, 2 the settings are wrong."""
    try:
        settings = load_settings(StateCheckSettings, sys.argv[1:], os.environ)
    except BadConfiguration as error:
        return report_bad_configuration(error)
    configure_logs(StateCheckSettings.section, settings.log_level)
    written = settings.result.with_suffix(".new")
    written.write_bytes(msgspec.msgpack.encode(check_state(settings)))
    written.replace(settings.result)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # the command line removes what is left
