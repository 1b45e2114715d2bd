"""docs/transforms.md and docs/clusters.md: what they show is a pipe file that passes every check, and commands that do what
the pages say."""

import asyncio
import os
import re
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from services.fleet.pipes.check import check_pipe_file
from tests.integration.test_docs import run_page

PAGE = Path(__file__).parents[2] / "docs" / "transforms.md"
EXAMPLE = Path(__file__).parents[2] / "examples" / "velocity.py"


@pytest.mark.spark
def test_the_page_works(tmp_path: Path) -> None:
    """Broken: a newcomer copies the page and gets an error, or `penstock try` prints something else than the page says."""
    blocks = dict(reversed(re.findall(r"```(yaml|python)\n(.*?)```", PAGE.read_text(), re.DOTALL)))  # the first of each
    (tmp_path / "pipes.yaml").write_text(blocks["yaml"])
    (tmp_path / "rounded.py").write_text(blocks["python"])
    (fraud,) = re.findall(r"`fraud.yaml`:\n\n```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "fraud.yaml").write_text(fraud)
    assert f"```python\n{EXAMPLE.read_text()}```" in PAGE.read_text()
    shutil.copy(EXAMPLE, tmp_path)
    pipes = check_pipe_file(tmp_path / "pipes.yaml", allow_networks="127.0.0.0/8")
    assert set(pipes.pipes) == {"large", "rounded"}
    page = asyncio.run(run_page("docs/transforms.md", tmp_path))
    shown = re.findall(r"```\n(outputs\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(shown) == 2
    printed = [" ".join(line.split()) for line in page.said.splitlines()]
    for line in "".join(shown).splitlines():
        expected = re.sub(r"2026-\S+Z", r"", " ".join(line.split()))
        assert expected in [re.sub(r"20\d\d-\S+Z", r"", one) for one in printed]


@pytest.mark.spark
@pytest.mark.kafka
async def test_the_page_of_clusters_works(tmp_path: Path) -> None:
    """Broken: docs/clusters.md shows commands that do not work, or the transform on the cluster passes no event on."""
    try:
        await run_page("docs/clusters.md", tmp_path, look_after='"id": "o-2"', for_text='"id":"o-2"')
    finally:
        for file in (tmp_path / "spark").glob("*.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)
