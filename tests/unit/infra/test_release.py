"""`make release`, on a copy of these files in a repository of its own: it pushes nothing, and changes nothing when it refuses."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.dev.release import build_image

REPOSITORY = Path(__file__).parents[3]
NEXT = "7.1.0"


class Clone:
    """The copy. The container engine's program is one whose daemon does not run."""

    def __init__(self, folder: Path) -> None:
        self.root, self._programs = folder / "clone", folder / "programs"
        parts = [
            "services",
            "spark",
            "infra",
            "examples",
            "tests/releases",
            "tests/support/schema_clients",
            "LICENSE",
            "docs",
            "*.md",
            "*.toml",
            ".gitignore",
        ]
        command = [
            "git",
            "ls-files",
            "-co",
            "--exclude-standard",
            *(f":(top,glob){one}" for one in parts if "*" in one),
        ]
        command += [one for one in parts if "*" not in one]
        listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        for name in (REPOSITORY / one for one in listed.stdout.splitlines()):
            if not name.exists():
                continue
            (target := self.root / name.relative_to(REPOSITORY)).parent.mkdir(parents=True, exist_ok=True)
            if name.is_symlink():
                target.symlink_to(name.readlink())
            else:
                shutil.copy2(name, target)
        self._programs.mkdir()
        (self._programs / "docker").write_text("#!/bin/sh\nexit 1\n")
        (self._programs / "docker").chmod(0o755)
        for words in ("init --quiet", "add --all", "commit --quiet --message all"):
            self.git(*words.split())

    def git(self, *arguments: str) -> str:
        return self._run("git", *arguments).stdout.strip()

    def release(self, *arguments: str, version: str = NEXT) -> subprocess.CompletedProcess[str]:
        return self._run(sys.executable, "infra/dev/release.py", version, *arguments, check=False)

    def _run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        who = {f"GIT_{role}_{key}": "a@b" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
        own = {"HOME": str(self.root.parent), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "", **who}
        path = f"{self._programs}{os.pathsep}{os.environ['PATH']}"
        environ = {**os.environ, **own, "PATH": path}
        return subprocess.run(command, cwd=self.root, check=check, capture_output=True, text=True, env=environ)

    def state(self) -> tuple[str, str, str]:
        return self.git("rev-parse", "HEAD"), self.git("status", "--porcelain"), self.git("tag")


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_it_refuses_what_is_not_ready(clone: Clone) -> None:
    """Broken: something is released that was not tested, cannot be told from another version, or has no signature."""
    before = clone.state()
    for arguments, version, words in (
        ((), NEXT, "make test TURNS=all has not passed for exactly these files"),
        (("--untested",), NEXT, "git has no signing key"),
        (("--untested", "--unsigned"), "7.1", "'7.1' is not a version"),
    ):
        done = clone.release(*arguments, version=version)
        assert (done.returncode, done.stderr.count("Try: ")) == (2, 1), done.stderr
        assert words in done.stderr
    clone.git("config", "gpg.format", "ssh")
    clone.git("config", "user.signingkey", "/nowhere/key.pub")
    refused = clone.release("--untested").stderr
    assert ("git cannot sign with user.signingkey /nowhere/key.pub: " in refused, refused.count("Try: ")) == (True, 1)
    assert clone.release("--untested", "--unsigned", "--dry-run").returncode == 0
    assert clone.state() == before
    clone.git("tag", "v8.0.0")
    assert "8.0.0 is released already" in clone.release("--untested", "--unsigned").stderr
    clone.git("tag", "--delete", "v8.0.0")
    (clone.root / "README.md").write_text("changed")
    assert "the tree is not clean" in clone.release("--untested", "--unsigned").stderr


def test_a_failed_build_leaves_no_trace(clone: Clone) -> None:
    """Broken: after a failure a person must find out which of the steps were done."""
    (clone.root / "infra" / "dev" / "sbom.py").write_text("raise SystemExit('no')")
    clone.git("commit", "--all", "--quiet", "--message", "broken")
    before = clone.state()
    assert clone.release("--untested", "--unsigned").returncode == 1
    assert clone.state() == before


def test_a_signed_release(clone: Clone) -> None:
    """Broken: a file of the release is missing or altered, the tag is not signed, or later tests run beside the wrong wheel."""
    key, other = clone.root.parent / "key", clone.root.parent / "other"
    for one in (key, other):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(one)], check=True)
    for name, value in (
        ("gpg.format", "ssh"),
        ("user.signingkey", f"{key}.pub"),
    ):
        clone.git("config", name, str(value))
    (clone.root / ".venv").mkdir(exist_ok=True)
    (clone.root / ".venv" / ".tested").write_text(clone.git("rev-parse", "HEAD^{tree}"))
    done = clone.release()
    assert done.returncode == 0, done.stderr
    assert "The image was not built: no container engine runs here" in done.stdout
    assert "make test TURNS=all passed for the commit before" in done.stdout
    assert "Nothing was pushed" in done.stdout
    dist = clone.root / "dist"
    page = (REPOSITORY / "docs" / "upgrading.md").read_text().partition("## Verify a release")[2]
    steps = page.partition("```bash\n")[2].partition("```")[0]  # what a person who downloaded the files does
    (dist / "signers").write_text(f"a@b {key.with_suffix('.pub').read_text()}")

    def verify() -> subprocess.CompletedProcess[str]:
        script = f"set -e; cd dist; {steps.replace('git fetch origin tag v0.2.0', ':').replace('0.2.0', NEXT)}"
        return clone._run("bash", "-c", script, check=False)

    verified = verify()
    assert (verified.returncode, "Good " in verified.stderr, verified.stdout.count(": OK")) == (0, True, 2), verified
    (wheel,) = dist.glob("*.whl")
    content = wheel.read_bytes()
    wheel.write_bytes(content + b" ")
    assert verify().returncode != 0, "a wheel that was changed"
    wheel.write_bytes(content)
    (dist / "signers").write_text(f"a@b {other.with_suffix('.pub').read_text()}")
    assert verify().returncode != 0, "somebody else's signature"
    (dist / "signers").unlink()
    assert {one.name for one in dist.iterdir()} == {
        f"penstock-{NEXT}-py3-none-any.whl",
        f"penstock-{NEXT}.cdx.json",
        "SHA256SUMS",
    }
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=dist, check=False).returncode == 0
    assert (dist / "SHA256SUMS").read_text().strip() in clone.git("tag", "-n99", f"v{NEXT}").replace("\n    ", "\n")
    assert f'VERSION = "{NEXT}"' in clone.git("show", f"v{NEXT}:services/core/version.py")
    assert f"## [Unreleased]\n\n## [{NEXT}] - 20" in clone.git("show", f"v{NEXT}:CHANGELOG.md")
    overlays = clone.git("ls-tree", "-r", "--name-only", f"v{NEXT}", "infra/kubernetes").splitlines()
    overlays = [name for name in overlays if name.endswith("/kustomization.yaml")]
    assert len(overlays) >= 5
    for name in overlays:
        text = clone.git("show", f"v{NEXT}:{name}")
        assert f"newTag: {NEXT}}}" in text
        assert set(re.findall(r"(?:penstock:|newTag: )(\d+\.\d+\.\d+)", text)) == {NEXT}, "executors, too"
    page = clone.git("show", f"v{NEXT}:docs/fleet.md")
    assert (page.count(f"penstock:{NEXT}"), page.count(f'images:{NEXT}"'), page.count(f"ImageTag={NEXT}")) == (4, 2, 1)
    assert 'VERSION = "7.2.0.dev0"' in (clone.root / "services" / "core" / "version.py").read_text()
    (kept,) = (clone.root / "tests" / "releases").glob("*.whl")
    assert kept.read_bytes() == (dist / kept.name).read_bytes()
    assert clone.git("status", "--porcelain") == ""
    assert clone.git("log", "--format=%s", "-2").splitlines()[1] == f"Release {NEXT}"


ENGINE = """#!/bin/sh
echo "$@" >> {log}
case "$1 $2" in
  "image inspect") echo sha256:4711 ;;
  "run --rm") printf 'libc6\\t2.36-9\\nzlib1g\\t1:1.2.13\\n' ;;
esac
"""


@pytest.mark.parametrize("working", ["docker", "podman"])
def test_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, working: str) -> None:
    """Broken: the image of a release has another tag or another Dockerfile, its id is not on record, or nobody knows its Debian
    packages; or an engine whose daemon does not run is used."""
    log = tmp_path / "calls"
    for name in ("docker", "podman"):
        (tmp_path / name).write_text(ENGINE.format(log=log) if name == working else "#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (dist := tmp_path / "dist").mkdir()
    image, packages = build_image(NEXT, dist)
    assert (image.name, image.read_text()) == (f"penstock-{NEXT}.image.txt", f"penstock:{NEXT} sha256:4711\n")
    assert (packages.name, packages.read_text()) == (
        f"penstock-{NEXT}.debian.txt",
        "libc6\t2.36-9\nzlib1g\t1:1.2.13\n",
    )
    assert log.read_text().splitlines() == [
        "info",
        f"build --file infra/container/Dockerfile --tag penstock:{NEXT} .",
        f"image inspect --format {{{{.Id}}}} penstock:{NEXT}",
        f"run --rm --network none --entrypoint dpkg-query penstock:{NEXT} --show",
    ]
