"""All bombs of the readers of schemas and IDL, one after the other in a process of its own: how much memory they take."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.avro import test_idl, test_parsing

REPOSITORY = Path(__file__).parents[3]
MOST_MB = 250
"""They took 54 MB on 29 November 2026. The largest text that is read has 1 MB."""
MOST_CPU_S = 60.0
"""For each. The longest took 0.33 s."""
CHILD = """
import json, resource, sys, time
from tests.unit.avro import test_idl, test_parsing

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

first, found = peak(), {}
module = {"test_idl": test_idl, "test_parsing": test_parsing}[sys.argv[1]]
for name, bomb in module.BOMBS.items():
    began = time.process_time()
    module.refusal(bomb)
    found[name] = time.process_time() - began
print(json.dumps([peak() - first, found]))
"""


@pytest.mark.parametrize(("name", "bombs"), [("test_parsing", test_parsing.BOMBS), ("test_idl", test_idl.BOMBS)])
def test_bombs_are_refused_in_bounded_time_and_memory(name: str, bombs: dict[str, str]) -> None:
    """Broken: a text of 1 MB takes all memory of a registry, or keeps it busy."""
    child = subprocess.run([sys.executable, "-c", CHILD, name], cwd=REPOSITORY, capture_output=True, check=True)
    megabytes, seconds = json.loads(child.stdout)
    assert seconds.keys() == bombs.keys()
    assert max(seconds.values()) < MOST_CPU_S
    assert megabytes < MOST_MB
