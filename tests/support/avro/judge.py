"""Avro's own Java as a judge: the jar in pyspark, and the reader of IDL of the same version (Judge.scala)."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from services.core.jvm.jars import AVRO_IDL, jar_set
from services.core.jvm.java import NO_PERF_FILE, find_java
from spark.jvm.classes import compiled_jar, pyspark_jars

_SOURCE = Path(__file__).with_name("Judge.scala")


def ask(questions: Iterable[tuple[str, ...]], *, imports: Path | None = None) -> list[str]:
    """The answers, in order: Judge.scala says which questions there are. One Java answers them all.

    imports: a folder in which IDL files find imports that are not beside them.
    """
    beside = tuple(jar_set(AVRO_IDL))
    judge = compiled_jar("penstock-avro-judge", [_SOURCE], beside=beside)
    more = [] if imports is None else [str(imports)]
    path = os.pathsep.join([str(judge), *map(str, beside), *more, f"{pyspark_jars()}{os.sep}*"])
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "questions"), Path(folder, "answers")
        with asked.open("w", encoding="utf-8") as file:
            file.writelines("\t".join(question) + "\n" for question in questions)
        java = [str(find_java().executable), NO_PERF_FILE, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xss16m"]
        # Avro warns about each logical type that does not fit.
        command = [*java, "-Dlog4j2.level=OFF", "-cp", path, "penstock.judge.Judge", str(asked), str(answered)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        # Not splitlines: a schema may have U+2028.
        return answered.read_text(encoding="utf-8").split("\n")[:-1]
