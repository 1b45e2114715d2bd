"""docs/runbooks: every alert has a page of one shape, and the commands of the pages exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from services.fleet import cli
from services.fleet.doctor.checks import CHECKS
from services.fleet.verbs.app import APP

REPOSITORY = Path(__file__).parents[3]
FOLDER = REPOSITORY / "docs" / "runbooks"
HEADINGS = ["What it means", "How to see it", "What to do", "When to wake whom"]
INDEX = FOLDER / "index.md"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path != INDEX)


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((REPOSITORY / "infra" / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def commands(text: str) -> Iterator[str]:
    """The commands of `penstock` in blocks of code, and in the text those with an argument; without the rest of a pipe."""
    blocks = re.findall(r"^ *```(?:sh|bash)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    words = re.findall(r"`(penstock [^`]*)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in (*"\n".join(blocks).splitlines(), *words):
        found = re.search(r"(?:^|\$\(|-- )(penstock (?!…).*?)(?=$|[|;&)]| #)", line.strip())
        if found is not None:
            yield found[1].strip()


def parse(arguments: list[str]) -> None:
    """Parse as the program does, down to the last sub-command, and run nothing. Raises the errors of the command line."""
    command: Any = get_command(APP)
    rest = list(arguments)
    while known := vars(command).get("commands"):
        assert rest, f"one of {', '.join(known)} is needed"
        name = rest.pop(0)
        assert name in known, f"no such command: {name}"
        command = known[name]
    command.make_context(command.name, rest)


def test_every_alert_has_its_page() -> None:
    """Broken: somebody is woken at 3 a.m. by an alert without a page; or a page is of no alert."""
    assert {page.stem for page in PAGES} == {rule["alert"] for rule in alerts()}
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/runbooks/{rule['alert']}.md"


def test_the_index_lists_every_page() -> None:
    """Broken: a page that only its alert knows, or a severity in the list that is not the alert's."""
    rows = re.findall(r"^\| \[(Penstock\w+)\]\(\1\.md\) \| ([a-z ]+) \|", INDEX.read_text(), re.MULTILINE)
    words = {"critical": "wakes a person", "warning": "within the day", "none": "fires always"}
    assert rows == [(rule["alert"], words[rule["labels"]["severity"]]) for rule in alerts()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_has_the_same_shape(page: Path) -> None:
    """Broken: at 3 a.m. each page must be searched; or a page does not say how to see it, or shows no command."""
    text = page.read_text()
    assert text.startswith(f"# {page.stem}\n")
    found = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    assert found[1::2] == HEADINGS
    assert all(section.strip() for section in found[2::2])
    assert "```" in found[4]


def test_whom_to_wake_agrees_with_the_severity() -> None:
    """Broken: an alert pages, and its page says that it can wait; or it waits for the day, and its page says to wake somebody."""
    wrong = {}
    for rule in alerts():
        text = (FOLDER / f"{rule['alert']}.md").read_text().partition("## When to wake whom\n")[2].strip()
        waits = text.startswith("Nobody ") and "at once" not in text
        pages = re.search(r"\bwake\b", text, re.IGNORECASE) and not re.search(
            r"\bnobody\b.* at night", text, re.IGNORECASE
        )
        if not (waits if rule["labels"]["severity"] == "warning" else pages):
            wrong[rule["alert"]] = (rule["labels"]["severity"], text)
    assert wrong == {}


def test_the_table_of_alerts_has_their_severities() -> None:
    """Broken: docs/monitoring.md says that an alert pages, and it does not."""
    page = (REPOSITORY / "docs" / "monitoring.md").read_text()
    rows = re.findall(r"^\| `(Penstock\w+)` \| ([a-z ]+) \|", page, re.MULTILINE)
    words = {"critical": "page", "warning": "team", "none": "every moment"}
    labels = ((rule["alert"], rule["labels"]) for rule in alerts())
    assert sorted(rows) == sorted((name, one.get("owner", words[one["severity"]])) for name, one in labels)


@pytest.mark.parametrize("page", [INDEX, *PAGES], ids=lambda page: page.stem)
def test_links(page: Path) -> None:
    """Broken: at 3 a.m. a link leads to nothing."""
    text = page.read_text()
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
        path = page.parent / target
        assert path.exists(), target
        titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
        assert not anchor or anchor in {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [INDEX, *PAGES], ids=lambda page: page.stem)
def test_the_commands_exist(page: Path) -> None:
    """Broken: a command of a runbook has an option that was renamed, and the engineer gets a usage error."""
    cli.load_verbs([])
    for line in commands(page.read_text()):
        try:
            parse(shlex.split(line)[1:])
        except Exception as error:  # of whatever kind: the command line's own
            pytest.fail(f"{page.name}: {line}: {error}")


def test_a_command_that_does_not_exist() -> None:
    """Broken: the test above accepts everything."""
    for line in ("penstock no-such-verb", "penstock dead list --no-such-option", "penstock destination resume"):
        with pytest.raises(Exception, match=r"no such command|No such option|Missing parameter"):
            parse(shlex.split(line)[1:])


def test_the_doctor_names_pages_that_exist() -> None:
    """Broken: the doctor sends the engineer to a page that is not there."""
    sources = (REPOSITORY / "services" / "fleet" / "doctor").rglob("*.py")
    named = {name for path in sources for name in re.findall(r"Penstock[A-Z]\w+", path.read_text())}
    assert {check.runbook for check in CHECKS} <= named <= {page.stem for page in PAGES}
