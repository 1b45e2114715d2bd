"""Modules that have other names in the last release: under it, they can be imported by their present names.

Import it before them. After the next release it is needed no more.
"""

import sys
from importlib import import_module
from importlib.util import find_spec

FORMER = {
    "services.core.control.pauses": "services.core.pauses",
    "services.core.pipe_file.pipes": "services.core.pipes",
    "services.core.pipe_file.snapshot": "services.core.snapshot",
    "services.core.process.lifecycle": "services.core.lifecycle",
    "services.core.undelivered.dead_letter": "services.core.dead_letter",
    "services.core.undelivered.retry_state": "services.core.retry_state",
    "services.core.undelivered.waiting": "services.core.waiting",
}

for present, former in FORMER.items():
    if find_spec(former) is not None:
        sys.modules[present] = import_module(former)
