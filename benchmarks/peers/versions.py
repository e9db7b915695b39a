"""What the peers are: looked up in their own virtual environments, never imported."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

_ASK = """
import sys
from importlib.metadata import PackageNotFoundError, version
for name in sys.argv[1:]:
    try:
        print(name, version(name))
    except PackageNotFoundError:
        pass
"""
_DELAY = re.compile(r"pthrDelay = (\d+)")


def python_of(folder: Path) -> Path:
    """The Python of a virtual environment."""
    return folder / "bin" / "python"


def versions(python: Path, names: Sequence[str]) -> str:
    """Of the distributions that are installed there; empty when it cannot be asked."""
    try:
        told = subprocess.run([python, "-c", _ASK, *names], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return ", ".join(told.stdout.splitlines())


def nixl_delay_us(folder: Path) -> int | None:
    """How long NIXL's progress thread rests between looks in that environment: 0, as it comes, spins on a core."""
    for file in sorted(folder.glob("lib/python*/site-packages/nixl_cu*/_api.py")):
        if found := _DELAY.search(file.read_text(encoding="utf-8")):
            return int(found[1])
    return None
