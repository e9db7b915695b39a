"""The repository as syntax trees: what the rules in this folder look at."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "router",
    "prefill_worker",
    "decode_worker",
    "kv_transfer",
    "engine",
    "cluster",
    "simulation",
    "chaos",
    "planner",
)
GENERATED = "cluster/stubs/"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file. `module` is its import name, `path` is relative to the repository."""

    path: str
    module: str
    text: str
    tree: ast.Module

    def imports(self) -> Iterator[tuple[str, int]]:
        """Every imported module with its line, `from a import b` as both `a` and `a.b`, wherever it stands."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((name.name, node.lineno) for name in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:  # none are expected; count them from the package
                    package = self.module.split(".")[: -node.level] if self.module else []
                    base = ".".join([*package, base]).strip(".")
                yield base, node.lineno
                yield from ((f"{base}.{name.name}", node.lineno) for name in node.names)

    def functions(self) -> Iterator[Function]:
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                yield node


def _load(path: Path) -> Source:
    relative = path.relative_to(ROOT).as_posix()
    module = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    text = path.read_text(encoding="utf-8")
    return Source(relative, module, text, ast.parse(text, relative))


@lru_cache(maxsize=1)
def product() -> tuple[Source, ...]:
    """Every hand-written file of the packages."""
    found = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return tuple(source for source in map(_load, found) if not source.path.startswith(GENERATED))


@lru_cache(maxsize=1)
def suite() -> tuple[Source, ...]:
    """Every file below tests/."""
    return tuple(map(_load, sorted((ROOT / "tests").rglob("*.py"))))


def top(module: str) -> str:
    """`a` of `a.b.c`."""
    return module.partition(".")[0]
