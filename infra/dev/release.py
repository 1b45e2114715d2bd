"""Makes a release on this machine, and publishes nothing: make release VERSION=0.2.0, or infra/dev/release.py 0.2.0

1. Checks that the tree is clean, that `make test TURNS=all` has passed for exactly these files, and that git can sign.
2. Moves the lines of [Unreleased] in CHANGELOG.md to the version with today's date, and sets the version, also as the tag of the
   image in manifests and commands.
3. Builds into dist/: the wheel, the bill of materials, the image where a container engine runs, and SHA256SUMS.
4. Commits, and makes the signed tag vVERSION, whose message has the sums.
5. Opens the next version in a second commit. Its tests run beside the wheel of this release (tests/releases).

Nothing is committed before everything is built. It never pushes; at the end it prints the commands for that.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION_FILE = ROOT / "services" / "core" / "version.py"
CHANGELOG = ROOT / "CHANGELOG.md"
RELEASES = ROOT / "tests" / "releases"
TESTED = ROOT / ".venv" / ".tested"
"""The git tree for which `make test TURNS=all` passed last."""
ENGINES = ("docker", "podman")
_NUMBER = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
_UNRELEASED = "## [Unreleased]\n"
_IMAGE_TAG = re.compile(r"(penstock:|images:|newTag: |ImageTag=)\d+\.\d+\.\d+")


class Refused(Exception):
    """The release cannot be made. what: why not; remedy: a thing to try. Nothing was changed."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what, self.remedy = what, remedy


def run(*command: str | Path) -> str:
    """What the command printed. Raises subprocess.CalledProcessError."""
    done = subprocess.run(list(map(str, command)), cwd=ROOT, check=True, capture_output=True, text=True)  # noqa: S603
    return done.stdout.strip()


def tree() -> str:
    """Names the content of all files of the last commit, whatever its message."""
    return run("git", "rev-parse", "HEAD^{tree}")


def parse(version: str) -> tuple[int, ...]:
    """Raises Refused unless it is three numbers."""
    found = _NUMBER.fullmatch(version)
    if found is None:
        raise Refused(f"{version!r} is not a version", "three numbers, e.g. make release VERSION=0.2.0")
    return tuple(map(int, found.groups()))


def check(version: str, *, signed: bool, tested: bool) -> None:
    """Raises Refused for the first thing that is not ready. signed, tested: whether these are required."""
    wanted = parse(version)
    if changed := run("git", "status", "--porcelain"):
        raise Refused(f"the tree is not clean:\n{changed}", "commit or stash it")
    known = [tag.removeprefix("v") for tag in run("git", "tag", "--list", "v*").splitlines()]
    if older := [one for one in known if _NUMBER.fullmatch(one) and parse(one) >= wanted]:
        raise Refused(f"{older[-1]} is released already", f"a version after {max(older, key=parse)}")
    if not unreleased().strip():
        raise Refused("CHANGELOG.md has nothing under [Unreleased]", "a line for who upgrades")
    if tested and not is_tested():
        raise Refused(
            "make test TURNS=all has not passed for exactly these files on this machine",
            "make test TURNS=all; or --untested",
        )
    if signed and not signing_key():
        raise Refused(
            "git has no signing key (user.signingkey), so the tag cannot be signed",
            "git config gpg.format ssh && git config user.signingkey ~/.ssh/id_ed25519.pub; or --unsigned",
        )
    if signed and (why := why_not_signed()):
        raise Refused(
            f"git cannot sign with user.signingkey {signing_key()}: {why}",
            "ssh-add, or the private key beside the public one (gpg: gpg --list-secret-keys); or --unsigned",
        )


def is_tested() -> bool:
    return TESTED.exists() and TESTED.read_text(encoding="utf-8").strip() == tree()


def signing_key() -> str:
    done = subprocess.run(["git", "config", "--get", "user.signingkey"], cwd=ROOT, capture_output=True, text=True)  # noqa: S607
    return done.stdout.strip()


def why_not_signed() -> str:
    """Why nothing can be signed; empty when it can. Signs an object to which nothing refers, so git removes it some day."""
    command = ["git", "commit-tree", "HEAD^{tree}", "-S", "-m", "may this key sign?"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)  # noqa: S603
    return "" if done.returncode == 0 else " ".join(done.stderr.split()) or f"status {done.returncode}"


def unreleased() -> str:
    """The lines under [Unreleased]. Raises Refused without that heading."""
    text = CHANGELOG.read_text(encoding="utf-8")
    if _UNRELEASED not in text:
        raise Refused("CHANGELOG.md has no heading [Unreleased]", "## [Unreleased], above the newest version")
    return re.split(r"^## \[", text.partition(_UNRELEASED)[2], maxsplit=1, flags=re.MULTILINE)[0]


def set_version(version: str) -> None:
    text = VERSION_FILE.read_text(encoding="utf-8")
    VERSION_FILE.write_text(
        re.sub(r'^VERSION = ".*"$', f'VERSION = "{version}"', text, flags=re.MULTILINE), encoding="utf-8"
    )


def set_image_tags(version: str) -> None:
    """Manifests and commands name the image of the last release."""
    for path in (ROOT / "docs" / "fleet.md", *sorted((ROOT / "infra" / "kubernetes").glob("*/kustomization.yaml"))):
        path.write_text(_IMAGE_TAG.sub(rf"\g<1>{version}", path.read_text(encoding="utf-8")), encoding="utf-8")


def date_changelog(version: str) -> None:
    text = CHANGELOG.read_text(encoding="utf-8")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    CHANGELOG.write_text(text.replace(_UNRELEASED, f"{_UNRELEASED}\n## [{version}] - {today}\n", 1), encoding="utf-8")


def build(version: str, folder: Path) -> list[Path]:
    """The files of the release, SHA256SUMS last. Prints why the image is not among them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder)
    files = [folder / f"penstock-{version}-py3-none-any.whl", folder / f"penstock-{version}.cdx.json"]
    run(sys.executable, "infra/dev/sbom.py", files[1])
    files += build_image(version, folder)
    sums = folder / "SHA256SUMS"
    sums.write_text(
        "".join(f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in files), encoding="utf-8"
    )
    return [*files, sums]


def build_image(version: str, folder: Path) -> list[Path]:
    """A file with the image's id, and one with the Debian packages in it, which no lock of ours names. Empty, with the reason and
    the command printed, when none can be built here."""
    image = f"penstock:{version}"
    command = ["build", "--file", "infra/container/Dockerfile", "--tag", image]
    engine = next((name for name in ENGINES if is_running(name)), None)
    if engine is None:
        print("The image was not built: no container engine runs here (docker, podman). Where one runs:")
        print(f"  git checkout v{version} && docker {' '.join(command)} .")
        return []
    run(engine, *command, ".")
    named = folder / f"penstock-{version}.image.txt"
    found = run(engine, "image", "inspect", "--format", "{{.Id}}", image)
    named.write_text(f"{image} {found}\n", encoding="utf-8")
    packages = folder / f"penstock-{version}.debian.txt"
    listed = run(engine, "run", "--rm", "--network", "none", "--entrypoint", "dpkg-query", image, "--show")
    packages.write_text(f"{listed}\n", encoding="utf-8")
    return [named, packages]


def is_running(engine: str) -> bool:
    """Whether its daemon answers, where it has one."""
    if shutil.which(engine) is None:
        return False
    return subprocess.run([engine, "info"], capture_output=True, timeout=60, check=False).returncode == 0  # noqa: S603


def following(version: str) -> str:
    major, minor, _ = parse(version)
    return f"{major}.{minor + 1}.0.dev0"


def tag(version: str, files: Sequence[Path], *, signed: bool, tested: bool) -> None:
    """Annotated, on the last commit. The message has the sums, so the signature holds for the files, too."""
    state = (
        "make test TURNS=all passed for the commit before."
        if tested
        else "make test TURNS=all was not run for it on this machine."
    )
    message = f"Penstock {version}\n\n{state}\n\n{files[-1].read_text(encoding='utf-8')}"
    run("git", "tag", "--sign" if signed else "--annotate", f"v{version}", "--message", message)


def keep_wheel(wheel: Path) -> None:
    """The tests of the next version run beside it."""
    for old in RELEASES.glob("*.whl"):
        old.unlink()
    shutil.copy(wheel, RELEASES)


def release(version: str, *, signed: bool) -> None:
    """All steps after `check`. When one fails, the files and the last commit are as before."""
    before = run("git", "rev-parse", "HEAD")
    is_known = is_tested()
    try:
        set_version(version)
        date_changelog(version)
        set_image_tags(version)
        files = build(version, ROOT / "dist")
        run("git", "commit", "--quiet", "--all", "--message", f"Release {version}")
        tag(version, files, signed=signed, tested=is_known)
        set_version(following(version))
        keep_wheel(files[0])
        run("git", "add", "--all", RELEASES, VERSION_FILE)
        run(
            "git", "commit", "--quiet", "--message", f"Begin {following(version)}; tests run beside {version} from here"
        )
    except BaseException:
        run("git", "reset", "--quiet", "--hard", before)
        subprocess.run(["git", "tag", "--delete", f"v{version}"], cwd=ROOT, capture_output=True, check=False)  # noqa: S603, S607
        raise
    for line in report(version, files, signed=signed, tested=is_known):
        print(line)


def report(version: str, files: Sequence[Path], *, signed: bool, tested: bool) -> Iterator[str]:
    """For the person who releases."""
    yield f"Penstock {version}: tag v{version}, {'signed' if signed else 'NOT SIGNED'}"
    passed = "make test TURNS=all passed for the commit before"
    yield f"  tests: {passed if tested else 'NOT RUN for this commit on this machine'}"
    if signed:
        yield f"  verify it: git tag --verify v{version}   (docs/upgrading.md says how others do)"
    for one in files:
        yield f"  {os.path.relpath(one, ROOT)}  {one.stat().st_size:,} bytes"
    yield f"Nothing was pushed. To publish:\n  git push origin HEAD v{version}"
    yield f"To take it back: git tag --delete v{version} && git reset --hard HEAD~2"


def main(arguments: Sequence[str]) -> int:
    """0 done, 1 failed, 2 refused."""
    parser = argparse.ArgumentParser(
        prog="make release",
        description="Makes a release on this machine and pushes nothing.",
        epilog='Example: make release VERSION=0.2.0, or make release VERSION=0.2.0 ARGS="--dry-run"',
    )
    parser.add_argument("version", help="three numbers, e.g. 0.2.0")
    parser.add_argument("--dry-run", action="store_true", help="check everything and say what would be done")
    parser.add_argument("--unsigned", action="store_true", help="an annotated tag without a signature")
    parser.add_argument(
        "--untested", action="store_true", help="although make test TURNS=all has not passed for these files here"
    )
    given = parser.parse_args(arguments)
    try:
        check(given.version, signed=not given.unsigned, tested=not given.untested)
        if given.dry_run:
            print(f"Ready for {given.version}; then {following(given.version)}. Its changes:\n{unreleased().strip()}")
            return 0
        release(given.version, signed=not given.unsigned)
    except Refused as error:
        print(f"error: {error.what}\n  Try: {error.remedy}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"error: {error}\n{error.stderr}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
