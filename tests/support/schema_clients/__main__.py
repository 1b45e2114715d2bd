"""`python -m tests.support.schema_clients`."""

import sys

from tests.support.schema_clients import main

sys.exit(main())
