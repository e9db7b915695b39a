"""The fenced blocks of the README and of docs/*.md, and the commands in those that are for a shell.

A page's commands can be run as one script, in order, on a cluster of its own (tests/integration/test_documents.py).
What is in front of a cluster - kubectl, helm, docker, make - is looked at by tests/deploy/test_guides.py instead.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RUN = ("headrace", "curl", "tail", "export")
"""Programs whose commands are run as they stand."""

NEEDS_NO_CLUSTER = {"config", "model", "sim", "up"}
NOT_RUN = {
    "node": "a machine of its own: tests/integration/test_pods.py runs it as pods do",
    "leave": "the same",
    "--seeds": "many worlds take many minutes: tests/sim plays them",
}
"""Subcommands and options of ours that no script of a page runs, and why."""

_FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INNER = re.compile(r"\$\(([^()]*)\)")
_SAID = re.compile(r"^(?:\+ )?: ran (\d+)$", re.MULTILINE)
_ASSIGNED = re.compile(r"^([A-Za-z_]+)=")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `line` is where it begins."""

    page: Path
    line: int
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a shell block, as it stands there."""

    page: Path
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def program(self) -> str:
        return self.words[0]

    def __str__(self) -> str:
        return f"{self.page.name}: {' '.join(self.text.split())[:100]}"


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        yield Block(page, text[: found.start()].count("\n") + 1, found[1], found[2])


def statements(page: Path) -> Iterator[str]:
    """What a shell would take for a command each, comments and loops' own words left out."""
    for block in blocks(page):
        pending = ""
        for line in block.text.splitlines() if block.language == "sh" else ():
            pending += line + "\n"
            if _complete(pending):
                words = shlex.split(pending, comments=True)
                if words and words[0] == "until":
                    yield pending.strip().removeprefix("until ").removesuffix("; do")
                elif words and words[0] not in ("for", "done", "sleep"):
                    yield pending.strip()
                elif words:
                    yield from _INNER.findall(pending)
                pending = ""
        assert not pending, f"{page.name}:{block.line}: a command without an end"


def _complete(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return not text.endswith("\\\n")


def commands(page: Path) -> Iterator[Command]:
    """Every simple command: also within `$(...)`, behind `&&`, and what `kubectl exec ... --` runs in a pod."""
    for statement in statements(page):
        yield from _commands(page, statement)


def _commands(page: Path, statement: str) -> Iterator[Command]:
    for part in [*_INNER.findall(statement), *re.split(r" && ", statement)]:
        words = shlex.split(part, comments=True)
        while words and _ASSIGNED.match(words[0]):
            part = part.strip().removeprefix(words.pop(0)).strip() if "$(" not in words[0] else ""
            words = shlex.split(part, comments=True) if part else []
        if not words:
            continue
        yield Command(page, part.strip())
        if words[0] == "kubectl" and " -- " in part:
            yield Command(page, part.partition(" -- ")[2].strip())


def to_run(page: Path) -> list[Command]:
    """All of ours on a page but those that are NOT_RUN."""
    return [each for each in commands(page) if each.program == "headrace" and NOT_RUN.keys().isdisjoint(each.words)]


def told(shown: str) -> int:
    """How many of ours a script has run, by what bash or the script itself says."""
    return sum(int(number) for number in _SAID.findall(shown))


def script(page: Path) -> str:
    """The page's commands for bash, those that are run; `$CLUSTER` is the file with which clusters are started.

    After each that has ours in it, it says of how many (`told`): bash, which ends at the first that fails, was there.
    """
    lines, up = ["set -euo pipefail", "set -x"], False
    for statement in map(_in_the_pod, statements(page)):
        words = shlex.split(statement, comments=True)
        if words[0] not in RUN or (words[0] == "headrace" and not NOT_RUN.keys().isdisjoint(words)):
            continue
        sub = words[1] if words[0] == "headrace" else ""
        if sub not in NEEDS_NO_CLUSTER and not up:
            lines.append('headrace up --detach -f "$CLUSTER"')
            up = True
        lines.append(_started(statement) if sub == "up" else _asked(statement))
        if ours := sum(each.program == "headrace" for each in _commands(page, statement)):
            lines.append(f": ran {ours}")
        up = "--detach" in words if sub == "up" else up and sub != "down"
    return "\n".join([*lines, *(["headrace down"] if up else [])]) + "\n"


def first_cluster(text: str) -> str:
    """A script until its first cluster is down again."""
    before, down, _ = text.partition("\nheadrace down\n")
    return before + down


def _in_the_pod(statement: str) -> str:
    return statement.partition(" -- ")[2] if statement.startswith("kubectl") and " -- " in statement else statement


def _started(statement: str) -> str:
    """With the test's file where the page names none; one in the foreground is left when it says that it is ready."""
    command = statement.partition("#")[0].strip()
    command = command if " -f " in command else f'{command} -f "$CLUSTER"'
    return command if "--detach" in command else f"until_ready {command}"


def _asked(statement: str) -> str:
    """Of the cluster that there is. `status` says 1 while something still starts, and `--watch` would stay."""
    if statement.startswith("headrace status --watch"):
        return f"until_all_ready {statement}"
    if statement.startswith("headrace status"):
        return f"ready_or_not {statement}"
    return statement.replace("127.0.0.1:8000", "127.0.0.1:$HTTP_PORT")
