"""`python -m services.global_retrier`."""

import os
import sys

from services.core.process.lifecycle import run_service
from services.global_retrier.app import start
from services.global_retrier.settings import RetrierSettings

if __name__ == "__main__":
    sys.exit(run_service(RetrierSettings, start, sys.argv[1:], dict(os.environ)))
