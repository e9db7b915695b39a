"""Print what pyproject.toml needs at run time, one requirement a line: images install it before they copy the code."""

import sys
import tomllib
from pathlib import Path

for requirement in tomllib.loads(Path(sys.argv[1]).read_text())["project"]["dependencies"]:
    sys.stdout.write(f"{requirement}\n")
