"""Fetching jars: the lock is exact, a fetch is all or nothing, and nothing altered gets through."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from services.core.jvm import jars
from services.core.jvm.jars import Jar, JarsUnavailable, ivy_module, jar_set, read_lock, verify
from services.core.jvm.java import JavaRuntime

CONTENT = b"a jar"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock of one set with two jars, and an empty cache."""
    monkeypatch.setenv("PENSTOCK_JARS", str(tmp_path / "cache"))
    path = tmp_path / "jars.lock"
    path.write_text(f"# two jars\n[some]\norg.a:one:1.0 {SHA256}\norg.b:two:2.0 {SHA256}\n")
    return path


def fake_ivy(*contents: bytes) -> Callable[[list[str]], None]:
    """In Ivy's place: writes one.jar and two.jar with these contents, as far as they go."""

    def run(arguments: list[str]) -> None:
        target = Path(arguments[arguments.index("-retrieve") + 1]).parent
        target.mkdir(exist_ok=True)
        for name, content in zip(("one-1.0.jar", "two-2.0.jar"), contents, strict=False):
            (target / name).write_bytes(content)

    return run


def test_the_lock_names_the_versions_that_work_together() -> None:
    """If this fails, the connector is not the one of the pinned pyspark, or its client or the server are not the tried ones."""
    sets = read_lock()
    connector = {jar.artifact: jar.version for jar in sets[jars.SPARK_KAFKA]}
    assert connector["spark-sql-kafka-0-10_2.13"] == "4.2.0"
    assert connector["kafka-clients"].startswith("3.9.")
    store = {jar.artifact: jar.version for jar in sets[jars.SPARK_S3]}
    assert store["hadoop-aws"] == "3.5.0", "the version of hadoop-client-api in pyspark"
    sdk = {jar.version for jar in sets[jars.SPARK_S3] if jar.group == "software.amazon.awssdk"}
    assert sdk == {"2.35.4"}, "the version that hadoop-aws was built with"
    server = {jar.artifact: jar.version for jar in sets[jars.KAFKA_SERVER]}
    assert server["kafka_2.13"].startswith("4.1.")
    assert "log4j-slf4j-impl" in server
    assert {jar.version for jar in sets[jars.KAFKA_WRITERS] if "kafka" in jar.group} == {server["kafka_2.13"]}


@pytest.mark.parametrize("line", ["org.a:one 00", f"org.a:one:1:jar {SHA256}", "org.a:one:1 abc", "word"])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    """If this fails, a damaged lock is read as something else."""
    path = tmp_path / "jars.lock"
    path.write_text(f"[some]\n\n{line}\n")
    with pytest.raises(ValueError, match=r"jars\.lock, line 3"):
        read_lock(path)


def test_a_jar_outside_a_set_is_refused(tmp_path: Path) -> None:
    """If this fails, a jar of no set is lost without a word."""
    path = tmp_path / "jars.lock"
    path.write_text(f"org.a:one:1 {SHA256}\n")
    with pytest.raises(ValueError, match="line 1"):
        read_lock(path)


def test_what_a_killed_fetch_left_is_removed(lock_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, each fetch that is killed leaves its jars, up to 300 MB, in the cache for ever."""
    left = jars.cache_folder() / "penstock-fetch-killed"
    left.mkdir(parents=True)
    (left / "penstock.lock").touch()
    monkeypatch.setattr(jars, "run_ivy", fake_ivy(CONTENT, CONTENT))
    (one, _) = jar_set("some", lock_file=lock_file)
    assert list(jars.cache_folder().iterdir()) == [one.parent]


def test_fetched_once_then_taken_from_the_cache(lock_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, every start downloads again, or the paths are not those of the lock, in its order."""
    monkeypatch.setattr(jars, "run_ivy", fake_ivy(CONTENT, CONTENT))
    paths = jar_set("some", lock_file=lock_file)
    assert [path.name for path in paths] == ["one-1.0.jar", "two-2.0.jar"]
    assert all(path.read_bytes() == CONTENT for path in paths)
    monkeypatch.setattr(jars, "run_ivy", fake_ivy())
    assert jar_set("some", lock_file=lock_file) == paths


@pytest.mark.parametrize(("contents", "said"), [((CONTENT,), "two-2.0.jar"), ((CONTENT, b"altered"), "two-2.0.jar")])
def test_missing_or_altered_leaves_nothing_behind(
    lock_file: Path, monkeypatch: pytest.MonkeyPatch, contents: tuple[bytes, ...], said: str
) -> None:
    """If this fails, a half or altered set of jars is used by whoever comes next."""
    monkeypatch.setattr(jars, "run_ivy", fake_ivy(*contents))
    with pytest.raises(JarsUnavailable, match=said):
        jar_set("some", lock_file=lock_file)
    assert list(jars.cache_folder().iterdir()) == []


def test_a_faster_process_wins(lock_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, two processes that fetch at the same time break each other."""
    slower = fake_ivy(CONTENT, CONTENT)

    def ivy_overtaken(arguments: list[str]) -> None:
        slower(arguments)
        monkeypatch.setattr(jars, "run_ivy", slower)
        jar_set("some", lock_file=lock_file)

    monkeypatch.setattr(jars, "run_ivy", ivy_overtaken)
    paths = jar_set("some", lock_file=lock_file)
    assert all(path.read_bytes() == CONTENT for path in paths)
    assert [path.name for path in jars.cache_folder().iterdir()] == [paths[0].parent.name]


def test_a_passing_fault_is_tried_again(lock_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, one lost connection ends the set-up of a whole machine."""
    working = fake_ivy(CONTENT, CONTENT)

    def ivy_once_down(arguments: list[str]) -> None:
        monkeypatch.setattr(jars, "run_ivy", working)
        raise JarsUnavailable("down")

    monkeypatch.setattr(jars, "run_ivy", ivy_once_down)
    assert len(jar_set("some", lock_file=lock_file)) == 2


def test_ivy_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If this fails, somebody behind a proxy does not learn what went wrong and what to try."""
    broken = tmp_path / "java"
    broken.write_text("#!/bin/sh\necho unresolved dependency: one >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(jars, "find_java", lambda: JavaRuntime(broken, tmp_path, 17, has_vector_module=True))
    with pytest.raises(JarsUnavailable, match=r"(?s)status 1.*Try: .*unresolved dependency: one"):
        jars.run_ivy([])


def test_ivy_module_asks_for_exactly_the_jars() -> None:
    """If this fails, Ivy fetches what a jar depends on, or takes a name for markup."""
    text = ivy_module([Jar("org.a", 'o"ne', "1", SHA256)])
    assert """<dependency org="org.a" name='o"ne' rev="1" transitive="false"/>""" in text


def test_verify_accepts_the_right_file(tmp_path: Path) -> None:
    """If this fails, good jars are refused."""
    (tmp_path / "one-1.jar").write_bytes(CONTENT)
    verify([Jar("org.a", "one", "1", SHA256)], tmp_path, "Try: nothing")


@pytest.mark.parametrize(
    ("content", "said"), [(b"a jaR", "one-1.0.jar is not the file"), (b"", "one-1.0.jar is not"), (None, "is missing")]
)
def test_what_was_fetched_is_checked_again_at_each_start(
    lock_file: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, said: str
) -> None:
    """If this fails, a jar that was altered after it was fetched runs in Spark, with its rights and secrets."""
    monkeypatch.setattr(jars, "run_ivy", fake_ivy(CONTENT, CONTENT))
    first, _ = jar_set("some", lock_file=lock_file)
    if content is None:
        first.unlink()
    else:
        first.write_bytes(content)
    with pytest.raises(JarsUnavailable, match=said) as caught:
        jar_set("some", lock_file=lock_file)
    assert f"find out who changed {first.parent}" in str(caught.value)
