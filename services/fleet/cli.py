"""`penstock`: the command line. Exit status: 0 done, 1 failed, 2 wrong command or configuration, 130 Ctrl-C."""

import logging
import sys
from collections.abc import Sequence
from importlib import import_module

import structlog

from services.core.security.masking import mask_secrets
from services.core.yaml_source import BadConfiguration
from services.fleet.console import print_failure, print_problems
from services.fleet.problem import CommandFailed
from services.fleet.verbs.app import APP, PANELS, arrange_help

_MODULES = {"init": "pipes", "check": "pipes", "apply": "pipes", "schema": "pipes", "try": "trial", "resume": "pause"}
"""The module in `verbs` of each command whose module has another name."""


def main() -> None:
    """Run the command that the command line names, and exit."""
    # The Kafka client logs each failed attempt. The command raises one error for all of them.
    logging.getLogger("aiokafka").addHandler(logging.NullHandler())
    # stdout has the results alone. What stderr is may change while a test runs.
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
            structlog.processors.format_exc_info,  # the default shows the values of variables, too
            mask_secrets,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
    load_verbs(sys.argv[1:])
    try:
        APP()
    except CommandFailed as error:
        print_failure(error)
        sys.exit(error.status)
    except BadConfiguration as error:
        print_problems(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


def load_verbs(arguments: Sequence[str]) -> None:
    """Add the command that the arguments begin with to APP; all commands when they begin with none.

    The import of a command's module adds it. All modules together take twice as long to import as one.
    """
    verbs = [verb for verbs in PANELS.values() for verb in verbs]
    wanted = arguments[:1] if set(arguments[:1]) & set(verbs) else verbs
    for verb in wanted:
        import_module(f"services.fleet.verbs.{_MODULES.get(verb, verb)}")
    arrange_help()
