"""`python -m services.expel`."""

import os
import sys

from services.core.process.lifecycle import run_service
from services.expel.app import start
from services.expel.settings import ExpelSettings

if __name__ == "__main__":
    sys.exit(run_service(ExpelSettings, start, sys.argv[1:], dict(os.environ)))
