"""`python -m services.ingest`."""

import os
import sys

from services.core.lifecycle import run_service
from services.ingest.app import calm_collector, start
from services.ingest.settings import IngestSettings

if __name__ == "__main__":
    calm_collector()
    sys.exit(run_service(IngestSettings, start, sys.argv[1:], dict(os.environ)))
