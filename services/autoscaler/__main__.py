"""`python -m services.autoscaler`."""

import os
import sys

from services.autoscaler.app import start
from services.autoscaler.settings import AutoscalerSettings
from services.core.process.lifecycle import run_service

if __name__ == "__main__":
    sys.exit(run_service(AutoscalerSettings, start, sys.argv[1:], dict(os.environ)))
