"""YAML as configuration: every mistake is named with file and line, and no small file becomes large or slow."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.yaml_source import MAX_FILE_BYTES, BadConfiguration, Problem, load_yaml, parse_yaml

FILE = Path("f.yaml")


def mistakes(text: str) -> list[str]:
    with pytest.raises(BadConfiguration) as caught:
        parse_yaml(text, FILE)
    return [str(problem) for problem in caught.value.problems]


def test_lines_of_keys_and_items() -> None:
    """Broken: a message points at the wrong line."""
    document = parse_yaml("a:\n  b: 1\n  c:\n    - x\n    - y\n", FILE)
    assert document.data == {"a": {"b": 1, "c": ["x", "y"]}}
    assert document.lines[("a", "b")] == 2
    assert document.lines[("a", "c", 1)] == 5
    assert str(document.problem(("a", "c", 1, "z"), "no")) == "f.yaml:5: a.c.1.z: no"


def test_lines_of_a_text() -> None:
    """Broken: the third line of a query is looked for in the third line of the file, or where `sql:` stands."""
    text = "a:\n  sql: |\n    SELECT\n\n    FORM s\n  one: SELECT 1\n  folded: >\n    a\n    b\n"
    document = parse_yaml(text, FILE)
    assert document.problem(("a", "sql"), "no", 3).where == "f.yaml:5"
    assert document.problem(("a", "sql"), "no").where == "f.yaml:2"
    assert document.problem(("a", "one"), "no", 1).where == "f.yaml:6"
    assert document.problem(("a", "folded"), "no", 2).where == "f.yaml:7", "its lines are not those of the file"


def test_duplicate_keys_all_named() -> None:
    """Broken: of two `url:` the last wins silently, and events go to the wrong place."""
    assert mistakes("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n") == [
        "f.yaml:4: b.c: occurs twice; first at line 3",
        "f.yaml:5: a: occurs twice; first at line 1",
    ]


def test_alias_bomb() -> None:
    """Broken: 300 bytes of YAML become gigabytes of configuration."""
    bomb = "a: &a [x, x]\n" + "".join(
        f"{new}: &{new} [*{old}, *{old}]\n" for old, new in zip("abcde", "bcdef", strict=True)
    )
    assert mistakes(bomb) == ["f.yaml:2: aliases (*name) are not allowed. Try: write the value again"]


@pytest.mark.parametrize("text", ["[" * 500_000, "{a: " * 100_000, "- " * 400_000])
def test_depth_is_bounded(text: str) -> None:
    """Broken: a file of brackets overflows the stack or keeps the parser busy for minutes."""
    assert mistakes(text) == ["f.yaml:1: more than 50 levels deep"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1,\n", "f.yaml:2: not valid YAML: "),
        ("a:\n  b: 1\n   c: 2\n", "f.yaml:3: not valid YAML: "),
        (
            "a:\n   b: {}\n  c: {}\n",
            "f.yaml:3: not valid YAML: expected <block end>, but found '<block mapping start>'; line 3 is indented differently",
        ),
        ("a:\n  - b\n c: 1\n", "f.yaml:3: not valid YAML: "),
        (
            "a:\n\tb: 1\n",
            "f.yaml:2: not valid YAML: found character '\\t' that cannot start any token. Try: use spaces",
        ),
        (
            "a: 1\n  b: 2\n",
            "f.yaml:2: not valid YAML: mapping values are not allowed here; line 2 is indented differently",
        ),
        *(
            (
                f"a:\n  sql: SELECT event{space}FROM s WHERE kind = 'a: b'\n",
                f"f.yaml:{line}: not valid YAML: mapping values are not allowed here (a second `: `). Try: the text in quotes",
            )
            for line, space in ((2, " "), (3, "\n    "))
        ),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: not valid YAML: but found another document"),
        ("a: 1\nb: \x00\n", "f.yaml:2: has a character that YAML does not allow"),
        (
            "a: !!python/object/apply:os.system [ls]\n",
            "f.yaml:1: a: tag:yaml.org,2002:python/object/apply:os.system is",
        ),
        ("a: !secret x\n", "f.yaml:1: a: !secret is not allowed"),
        ("a:\n  <<: {b: 1}\n", "f.yaml:2: a: keys must be plain text"),
        ("? [a]\n: 1\n", "f.yaml:1: keys must be plain text"),
        ("a: 2013-99-99\n", "f.yaml:1: a: tag:yaml.org,2002:timestamp is not allowed"),
    ],
)
def test_what_yaml_may_not_do(text: str, expected: str) -> None:
    """Broken: a slip in the syntax gives a traceback, or something else than what stands there."""
    found = mistakes(text)
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_files(tmp_path: Path) -> None:
    """Broken: a missing, huge or binary file gives a traceback instead of its name."""
    binary, large, folder, empty = (tmp_path / name for name in ("binary", "large", "folder", "empty"))
    binary.write_bytes(b"a: 1\nb: \xff\n")
    large.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    folder.mkdir()
    empty.write_bytes(b"")
    expected = {
        tmp_path / "missing": f"{tmp_path}/missing: cannot be read: No such file or directory",
        folder: f"{folder}: cannot be read: Is a directory",
        binary: f"{binary}:2: is not UTF-8 text",
        large: f"{large}: is larger than 1000000 bytes",
    }
    for path, message in expected.items():
        with pytest.raises(BadConfiguration) as caught:
            load_yaml(path)
        assert str(caught.value) == message
    assert load_yaml(empty).data is None


def test_endless_file() -> None:
    """Broken: a device or endless pipe as configuration file fills the memory."""
    with pytest.raises(BadConfiguration, match="/dev/zero: is larger than"):
        load_yaml(Path("/dev/zero"))


def test_a_secret_in_the_wrong_place_is_not_shown() -> None:
    """Broken: a secret that was pasted as a key or into a URL ends up in the terminal and in logs."""
    problem = Problem("f.yaml:1", "secret.whsec_c2VjcmV0", "cannot reach https://user:hunter2@example.org/")
    assert str(problem) == "f.yaml:1: secret.***: cannot reach https://***@example.org/"


@given(st.text(alphabet="ab:-[]{}&*!|>'\"#%@`,? \n\t\\0x", max_size=60))
def test_any_text_gives_data_or_a_named_mistake(text: str) -> None:
    """Broken: some typo ends in a traceback."""
    found: list[Problem] = []
    try:
        parse_yaml(text, FILE)
    except BadConfiguration as error:
        found = error.problems
    assert all(str(problem).startswith("f.yaml") for problem in found)
