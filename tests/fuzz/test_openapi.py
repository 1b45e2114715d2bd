"""schemathesis against a real ingest process and the document that it serves.

Every run makes the same requests; another `PENSTOCK_FUZZ_SEED` makes others.
"""

import asyncio
import os
import sys
from pathlib import Path

from tests.integration.ingest_process import create_topics, running

SEED = int(os.environ.get("PENSTOCK_FUZZ_SEED", "1"))
EXAMPLES = 200
"""An operation's random requests, good and bad ones; the systematic ones come on top."""
ROOT = Path(__file__).parents[2]
# A good request goes to a stream that exists and takes no field of the payload for an id or a time. It is not compacted, so
# the answer to each deletion of a key, a bad key among them, is 409.
SETTINGS = """
[parameters]
"path.stream" = "plain"

[checks.negative_data_rejection]
expected-statuses = [207, 400, 401, 404, 405, 409, 413, 415, 417, 422, 431]
"""


async def test_every_answer_is_as_published(tmp_path: Path) -> None:
    """If it fails: a request that /openapi.json allows is refused, one that it forbids is taken, or an answer has a status,
    a media type, a header or a body that it does not name. Clients generated from it break."""
    await create_topics(tmp_path)
    await asyncio.to_thread((tmp_path / "schemathesis.toml").write_text, SETTINGS)
    async with running(tmp_path) as ingest:
        await ingest.until_ready()
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{ingest.port}/openapi.json"),
            *("--seed", str(SEED), "--max-examples", str(EXAMPLES), "--continue-on-failure", "--no-color"),
            *("--generation-database", "none", "--request-timeout", "20"),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "SCHEMATHESIS_HOOKS": "tests.fuzz.openapi_hooks"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await program.communicate()
        print(said.decode())
        assert program.returncode == 0, f"PENSTOCK_FUZZ_SEED={SEED}; see above what schemathesis found"
        assert await ingest.end() == 0
