"""Print what images install before they copy the code, one requirement a line: what pyproject.toml needs at run time,
and what it needs for tracing, which values of the chart turn on.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
for requirement in project["dependencies"] + project["optional-dependencies"]["tracing"]:
    sys.stdout.write(f"{requirement}\n")
