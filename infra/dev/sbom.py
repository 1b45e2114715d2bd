"""Writes the bill of materials from the lock files: dist/penstock.cdx.json, or the given path, as CycloneDX JSON 1.6.

python3 infra/dev/sbom.py

Needs no package, no network and no .venv. scope: required is what services run on, excluded what builds, checks and tests need.
"""

from __future__ import annotations

import json
import sys
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from infra.dev.lock_packages import FOLDER, SETS, read_lock  # noqa: E402  # the path comes first
from services.core.jvm.jars import AVRO_IDL, KAFKA_WRITERS  # noqa: E402  # as above
from services.core.jvm.jars import read_lock as read_jars  # noqa: E402  # as above
from services.core.version import VERSION  # noqa: E402  # as above

NPM_LOCKS = [
    ROOT / folder / "package-lock.json" for folder in ("services/core/emulator", "tests/support/schema_clients")
]
_RUN = ("services", "java")


def _component(purl: str, name: str, version: str, *, required: bool, **more: Any) -> dict[str, Any]:
    scope = "required" if required else "excluded"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "scope": scope, "purl": purl, **more}


def _packages() -> Iterator[dict[str, Any]]:
    for name in SETS:
        for one in read_lock(FOLDER / f"{name}.txt"):
            yield _component(f"pkg:pypi/{one.name}@{one.version}", one.name, one.version, required=name in _RUN)


def _jars() -> Iterator[dict[str, Any]]:
    """A jar of two sets once. Those that only tests need are excluded."""
    sets = read_jars()
    run = {jar for name, jars in sets.items() if name not in (AVRO_IDL, KAFKA_WRITERS) for jar in jars}
    for jar in dict.fromkeys(jar for jars in sets.values() for jar in jars):
        purl = f"pkg:maven/{jar.group}/{jar.artifact}@{jar.version}?type=jar"
        hashes = [{"alg": "SHA-256", "content": jar.sha256}]
        yield _component(purl, jar.artifact, jar.version, required=jar in run, group=jar.group, hashes=hashes)


def _modules() -> Iterator[dict[str, Any]]:
    """Of the Kinesis emulator, which tests and demos run, and of the clients that tests send to the registry."""
    seen = set()
    locks = [json.loads(lock.read_text(encoding="utf-8"))["packages"] for lock in NPM_LOCKS]
    for path, one in (item for packages in locks for item in packages.items()):
        name = path.rpartition("node_modules/")[2]
        purl = f"pkg:npm/{name.replace('@', '%40')}@{one['version']}" if name else ""
        if purl and purl not in seen:
            seen.add(purl)
            yield _component(purl, name, one["version"], required=False)


def make_sbom() -> dict[str, Any]:
    """The document. The same locks give the same one, byte by byte."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    purl = f"pkg:pypi/{project['name']}@{VERSION}"
    components = sorted((*_packages(), *_jars(), *_modules()), key=lambda one: str(one["purl"]))
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([purl, components]))
    licenses = [{"license": {"id": project["license"]}}]
    own = {"type": "application", "bom-ref": purl, "name": project["name"], "version": VERSION, "purl": purl}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": {**own, "licenses": licenses}},
        "components": components,
    }


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist" / "penstock.cdx.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    found = make_sbom()
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{target}: {len(found['components'])} components", file=sys.stderr)


if __name__ == "__main__":
    main()
