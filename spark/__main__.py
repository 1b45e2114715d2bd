"""`python -m spark`: the transform service."""

import os
import sys

from services.core.process.lifecycle import run_service
from spark.service import start
from spark.settings import TransformSettings


def main() -> int:
    """Exit status: 0 drained, 1 failed, 2 bad configuration."""
    return run_service(TransformSettings, start, sys.argv[1:], dict(os.environ))


if __name__ == "__main__":
    status = main()
    if status == 1:  # threads of pipes may still wait for a Java that is gone: Python's own end would crash on them
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
