"""One key of a settings file is set; comments, order and style of everything else stay."""

from pathlib import Path
from unittest.mock import AsyncMock

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from services.autoscaler.settings import AutoscalerSettings
from services.core.process.settings import load_settings
from services.fleet.problem import CommandFailed
from services.fleet.settings_edit import check_key, edit, set_key
from services.fleet.verbs import rate
from tests.unit.fleet.conftest import Shell

KEYS = ("autoscaler", "groups", "expel", "target_cpu")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", "autoscaler:\n  groups:\n    expel:\n      target_cpu: 0.7\n"),
        ("# only this\n", "# only this\nautoscaler:\n  groups:\n    expel:\n      target_cpu: 0.7\n"),
        (
            "up: {expel: 2}  # two\n",
            "autoscaler:\n  groups:\n    expel:\n      target_cpu: 0.7\nup: {expel: 2}  # two\n",
        ),
        (
            "autoscaler:\n  groups:\n    expel:\n      target_cpu: 0.5  # of old\n      max: 3\n",
            "autoscaler:\n  groups:\n    expel:\n      target_cpu: 0.7  # of old\n      max: 3\n",
        ),
        (
            "autoscaler:\n    groups:  # ours\n        ingest: {max: 3}\n",
            "autoscaler:\n    groups:  # ours\n        expel:\n          target_cpu: 0.7\n        ingest: {max: 3}\n",
        ),
        (
            "autoscaler: {dry_run: true, groups: {expel: {max: 8}}}\n",
            "autoscaler: {dry_run: true, groups: {expel: {target_cpu: 0.7, max: 8}}}\n",
        ),
        (
            "autoscaler:\n  groups:\nup:\n  expel: 2\n",
            "autoscaler:\n  groups: {expel: {target_cpu: 0.7}}\nup:\n  expel: 2\n",
        ),
        ("autoscaler: {}\n", "autoscaler: {groups: {expel: {target_cpu: 0.7}}}\n"),
    ],
)
def test_what_becomes_of_a_file(old: str, new: str) -> None:
    """Broken: a rating destroys what an operator wrote."""
    assert edit(old, KEYS, 0.7) == new
    assert edit(new, KEYS, 0.7) == new


NAMES = st.sampled_from(["autoscaler", "groups", "expel", "target_cpu", "up"])
TREES = st.recursive(
    st.none() | st.integers(0, 9) | st.just("a text: with # signs"),
    lambda inner: st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(TREES.filter(lambda tree: tree is None or isinstance(tree, dict)), st.sampled_from([None, True, False]))
def test_nothing_else_changes(tree: object, flow: bool | None) -> None:
    """Broken: for some shape of file another key is changed, or the file is no YAML afterwards."""
    old = yaml.safe_dump(tree, default_flow_style=flow) if tree is not None else ""
    try:
        new = yaml.safe_load(edit(old, KEYS, 0.7))
    except ValueError:
        return
    for key in KEYS[:-1]:
        new = new[key]
    assert new["target_cpu"] == 0.7


def test_the_settings_are_those_that_the_autoscaler_reads(tmp_path: Path) -> None:
    """Broken: what a rating writes is refused, or ignored, by who should follow it."""
    path = tmp_path / "penstock.yaml"
    set_key(path, KEYS, 0.7)
    path.chmod(0o640)
    set_key(path, (*KEYS[:2], "ingest", "target_cpu"), 0.4)
    groups = load_settings(AutoscalerSettings, ["--config", str(path)], {}).groups
    assert (groups["expel"].target_cpu, groups["ingest"].target_cpu) == (0.7, 0.4)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("text", ["- a list\n", "autoscaler: yes\n", "autoscaler: {groups: [1]}\n", "a: [\n"])
def test_what_cannot_be_changed_is_left_alone(tmp_path: Path, text: str) -> None:
    """Broken: a file that is wrong already is overwritten."""
    path = tmp_path / "penstock.yaml"
    path.write_text(text)
    with pytest.raises(CommandFailed):
        set_key(path, KEYS, 0.7)
    with pytest.raises(CommandFailed):
        check_key(path, KEYS)
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_check_changes_nothing(tmp_path: Path) -> None:
    """Broken: a rating that is broken off leaves a number that nobody measured."""
    path = tmp_path / "penstock.yaml"
    check_key(path, KEYS)
    assert not list(tmp_path.iterdir())
    path.write_text("up: {expel: 2}\n")
    check_key(path, KEYS)
    assert path.read_text() == "up: {expel: 2}\n"
    with pytest.raises(CommandFailed, match="cannot be changed"):
        check_key(tmp_path / "missing" / "penstock.yaml", KEYS)


def test_a_rating_checks_the_file_before_it_loads_the_machine(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a slip in --config is found out after a minute of load, and the rating is lost."""
    monkeypatch.setattr(rate, "_run", AsyncMock(side_effect=AssertionError("it was loaded")))
    path = tmp_path / "penstock.yaml"
    path.write_text("autoscaler: yes\n")
    assert shell.run("rate", "expel", "--config", path) == 1
    assert "cannot be changed" in shell.err
