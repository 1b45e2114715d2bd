"""`python -m services.table`."""

import os
import sys

from services.core.process.lifecycle import run_service
from services.core.process.startup import tune_garbage_collector
from services.table.app import start
from services.table.settings import TableSettings

if __name__ == "__main__":
    tune_garbage_collector()
    sys.exit(run_service(TableSettings, start, sys.argv[1:], dict(os.environ)))
