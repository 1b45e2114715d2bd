"""What is generated from the code is up to date, and says what the code does."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from infra.dev.pipe_file_page import find_example, find_places, meaning, object_of, pipe_file_page, references
from infra.dev.write_generated import FILES, MODELS, ROOT, default_config
from services.core.process.settings import load_settings
from services.fleet.verbs.pipes import STARTER

SCHEMA: dict[str, Any] = json.loads((ROOT / "schema" / "pipes.schema.json").read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path: Path) -> None:
    """Broken: editors and operators are told what was true once. Try: .venv/bin/python infra/dev/write_generated.py"""
    assert path.read_text(encoding="utf-8") == FILES[path]()


def test_no_metric_hides_another() -> None:
    """Broken: two metrics have one name in the code. Whoever uses the former fails, and its row is missing in docs/metrics.md."""
    tree = ast.parse((ROOT / "services" / "core" / "metrics.py").read_text())
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    assert len(names) == len(set(names)) > 50


def test_default_file_is_the_defaults(tmp_path: Path) -> None:
    """Broken: somebody who uncomments a line changes what the fleet does, or is refused."""
    text = re.sub(r"^# (\w+:|  \w+:)", r"\1", default_config(), flags=re.MULTILINE)
    file = tmp_path / "penstock.yaml"
    file.write_text(text)
    for model in MODELS:
        chosen = load_settings(model, ["--config", str(file)], {})
        different = {"broker"}  # of `fleet:`, while `up` has a default of its own
        assert chosen.model_dump(exclude=different) == load_settings(model, [], {}).model_dump(exclude=different)


@pytest.mark.parametrize(
    "text", [STARTER, *((ROOT / "examples" / name).read_text() for name in ("pipes.yaml", "many.yaml", "state.yaml"))]
)
def test_schema_takes_what_we_write(text: str) -> None:
    """Broken: an editor underlines our own examples."""
    jsonschema.Draft202012Validator(SCHEMA).validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("retention: 7d", "retention: 7"),
        ("partitions: 4", "partitions: 0"),
        ("sources:", "source:"),
        ("orders:\n", "Or.ders:\n"),
    ],
)
def test_schema_refuses_mistakes(old: str, new: str) -> None:
    """Broken: an editor calls a file good that does not start."""
    broken = yaml.safe_load(STARTER.replace(old, new, 1))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(broken)


def _keys() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (name, key, value)
        for name in find_places(SCHEMA)
        for key, value in object_of(SCHEMA, name)["properties"].items()
    ]


def test_every_key_of_the_pipe_file_is_on_its_page() -> None:
    """Broken: a key can be found only in the JSON Schema, or stands on the page without a meaning."""
    assert set(find_places(SCHEMA)) == {"", *SCHEMA["$defs"]}
    page = pipe_file_page()
    for name, key, value in _keys():
        assert meaning(SCHEMA, value), f"{name}.{key} has no description"
        assert f"\n| `{key}` | " in page
    links = set(re.findall(r"\]\(#(\w+)\)", page))
    headings = {re.sub(r"[^\w-]", "", line).lower() for line in re.findall(r"^## (.*)$", page, re.MULTILINE)}
    assert links <= headings


@pytest.mark.parametrize(("name", "key", "value"), _keys(), ids=lambda part: part if isinstance(part, str) else "")
def test_the_examples_on_the_page_are_good(name: str, key: str, value: dict[str, Any]) -> None:
    """Broken: somebody copies an example, and the file is refused."""
    example = find_example(value)
    if example == "…":  # an object, which has a section of its own
        assert list(references(value)), f"{name}.{key} has no example"
    else:
        jsonschema.Draft202012Validator({**value, "$defs": SCHEMA["$defs"]}).validate(example)
