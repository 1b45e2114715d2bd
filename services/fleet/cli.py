"""`penstock`: the command line. Exit status: 0 done, 1 failed, 2 wrong command or configuration, 130 Ctrl-C."""

import logging
import sys

from services.core.yaml_source import BadConfiguration
from services.fleet.console import print_failure, print_problems
from services.fleet.problem import CommandFailed
from services.fleet.verbs import (
    backup,
    cost,
    dead,
    demo,
    destination,
    doctor,
    event,
    group,
    keys,
    listen,
    log,
    loss,
    pause,
    pipes,
    planned,
    rate,
    scaling,
    send,
    status,
    trial,
    up,
)
from services.fleet.verbs.app import APP, arrange_help

VERBS = (
    backup,
    cost,
    dead,
    demo,
    destination,
    doctor,
    event,
    group,
    keys,
    listen,
    log,
    loss,
    pause,
    pipes,
    planned,
    rate,
    scaling,
    send,
    status,
    trial,
    up,
)
"""The import of a verb's module adds the verb to APP."""

arrange_help()


def main() -> None:
    """Run the command that the command line names, and exit."""
    # The Kafka client logs each failed attempt. The command raises one error for all of them.
    logging.getLogger("aiokafka").addHandler(logging.NullHandler())
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
