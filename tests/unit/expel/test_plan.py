"""Expel alone checks its pipe file as the fleet does."""

from pathlib import Path

import pytest

from services.core.yaml_source import BadConfiguration
from services.expel.plan import read_plan
from services.expel.settings import ExpelSettings

HOOK = "webhook: {url: https://example.org/}"


@pytest.mark.parametrize(
    ("sources", "destinations", "words"),
    [
        ("[s]", f"[{{name: a, {HOOK}}}, {{name: a, {HOOK}}}]", r"destinations\[a\].name"),
        ("[s, nosuch]", f"[{{name: a, {HOOK}}}]", "sources.1"),
        ("[s]", "[{name: a, stream: s}]", "loop"),
    ],
)
def test_broken_references_are_refused(tmp_path: Path, sources: str, destinations: str, words: str) -> None:
    """Broken: two destinations of one name share a group, and each silently gets a part of the stream."""
    path = tmp_path / "pipes.yaml"
    path.write_text(f"streams: {{s: {{}}}}\npipes:\n  p: {{sources: {sources}, destinations: {destinations}}}\n")
    with pytest.raises(BadConfiguration, match=words):
        read_plan(ExpelSettings(pipes=path), {})
