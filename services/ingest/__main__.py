"""`python -m services.ingest`."""

import os
import sys

from services.core.process.lifecycle import run_service
from services.core.process.startup import tune_garbage_collector
from services.ingest.app import start
from services.ingest.settings import IngestSettings

if __name__ == "__main__":
    tune_garbage_collector()
    sys.exit(run_service(IngestSettings, start, sys.argv[1:], dict(os.environ)))
