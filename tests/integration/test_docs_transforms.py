"""docs/transforms.md: what it shows is a pipe file that passes every check."""

import re
from pathlib import Path

from services.fleet.pipe_check import check_pipe_file

PAGE = Path(__file__).parents[2] / "docs" / "transforms.md"


def test_the_page_is_a_working_pipe_file(tmp_path: Path) -> None:
    """Broken: a newcomer copies the page and gets an error."""
    blocks = dict(reversed(re.findall(r"```(yaml|python)\n(.*?)```", PAGE.read_text(), re.DOTALL)))  # the first of each
    (tmp_path / "pipes.yaml").write_text(blocks["yaml"])
    (tmp_path / "rounded.py").write_text(blocks["python"])
    pipes = check_pipe_file(tmp_path / "pipes.yaml", allow_networks="127.0.0.0/8")
    assert set(pipes.pipes) == {"large", "rounded"}
