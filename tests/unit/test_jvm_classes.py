"""Our classes for Spark's Java: compiled once on a machine, whole or not at all, and again for other sources."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.core.jvm.jars import JarsUnavailable
from services.core.jvm.java import JavaRuntime
from spark.jvm import classes


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_JARS", str(tmp_path / "cache"))


def fake_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """In Java's place: a shell script, with the option `-d PATH` of the compiler as $made."""
    java = tmp_path / "java"
    java.write_text(f'#!/bin/sh\nwhile [ "$1" != -d ]; do shift; done\nmade=$2\n{script}\n')
    java.chmod(0o755)
    monkeypatch.setattr(classes, "find_java", lambda: JavaRuntime(java, tmp_path, 17, has_vector_module=True))


def test_starts_at_the_same_time_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, each service that starts on a new machine runs a compiler, or one of them uses a half jar."""
    fake_java(monkeypatch, tmp_path, f"echo run >> {tmp_path}/runs; sleep 0.2; echo jar > $made")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: classes.classes_jar(), range(4)))
    assert len(set(found)) == 1
    assert found[0].read_text() == "jar\n"
    assert (tmp_path / "runs").read_text() == "run\n"


def test_a_compiler_that_fails_is_quoted_and_leaves_no_jar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, nobody learns why a transform does not start, or a half jar is used by whoever comes next."""
    fake_java(monkeypatch, tmp_path, "echo half > $made; echo error: not found: type Long >&2; exit 1")
    with pytest.raises(JarsUnavailable, match=r"(?s)status 1.*Try: .*not found: type Long"):
        classes.classes_jar()
    assert list((tmp_path / "cache").glob("*.jar")) == []


def test_other_sources_are_another_jar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a new version runs with the classes of the old one."""
    fake_java(monkeypatch, tmp_path, "echo jar > $made")
    first = classes.classes_jar()
    assert classes.classes_jar() == first
    folder = tmp_path / "jvm"
    folder.mkdir()
    for source in classes._SOURCES.glob("*.scala"):
        shutil.copy(source, folder)
    with (folder / "Functions.scala").open("a") as source_file:
        source_file.write("// another\n")
    monkeypatch.setattr(classes, "_SOURCES", folder)
    assert classes.classes_jar() != first
