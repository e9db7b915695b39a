"""Which format a model writes its calls in, seen in its chat template; and the fold that reads it."""

from collections.abc import Callable

from router.front.tools.folds import CallFold, HermesCalls, JsonCalls, NamedCall
from router.front.tools.types import ToolFormat, ToolUse

# What only a template of that family says.
_SIGNS: tuple[tuple[str, ToolFormat | None], ...] = (
    ("<function=", None),  # Qwen3-Coder's own markup
    ("<tool_call>", "hermes"),
    ("ipython", "llama3_json"),
)


def format_of(template: str, *, knows_tools: bool) -> ToolFormat | None:
    """None: the template tells of tools, but in a format that is not read here.

    A template that knows no tools is helped out (plain.py) in Hermes' format.
    """
    if not knows_tools:
        return "hermes"
    return next((kind for sign, kind in _SIGNS if sign in template), None)


def fold_maker(use: ToolUse, kind: ToolFormat) -> Callable[[], CallFold]:
    """Makes one fold per sample. What a grammar demands is JSON alone, whatever the model's own format (schema.py)."""
    if use.named is not None:
        name = use.named
        return lambda: NamedCall(name)
    names = frozenset(tool.name for tool in use.tools)
    if use.must or kind == "llama3_json":
        return lambda: JsonCalls(names, parallel=use.parallel)
    return lambda: HermesCalls(parallel=use.parallel)
