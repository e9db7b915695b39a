"""`python -m tests.mutants [WORD...]`: every mutant, or those with one of the words in their name. 1: some survive."""

import sys
import tempfile
from pathlib import Path

from tests.mutants import MUTANTS
from tests.mutants.run import run_all


def main(words: list[str]) -> int:
    """Run and print the table. Returns the exit code."""
    wanted = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    if not wanted:
        _say(f"no mutant has one of the words {words} in its name")
        return 1
    with tempfile.TemporaryDirectory(prefix="headrace-mutants-") as folder:
        outcomes = run_all(wanted, Path(folder), _say)
    return 0 if all(outcome.verdict == "red" for outcome in outcomes) else 1


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
