"""One mutant: a line of the product made wrong, and the test that must notice."""

from dataclasses import dataclass


class Stale(Exception):
    """The line that a mutant changes is not in its file exactly once: the product has moved on."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """`before` and `after` are one line each, without its indentation; `test` is the node that has to turn red."""

    name: str
    file: str
    before: str
    after: str
    test: str

    def applied(self, text: str) -> str:
        """The file's text with the one line changed. Raises Stale."""
        lines = text.splitlines(keepends=True)
        places = [number for number, line in enumerate(lines) if line.strip() == self.before]
        if len(places) != 1:
            raise Stale(f"{self.name}: {self.file} has {len(places)} lines {self.before!r}")
        lines[places[0]] = lines[places[0]].replace(self.before, self.after)
        return "".join(lines)
