"""Alarms of size and rules of style that ruff has no words for. Raising one needs a record in docs/decisions/."""

import ast

import pytest

from tests.architecture.source import Function, Source, product, suite

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CONSTRUCTOR_PARAMETERS = 7
MAX_ATTRIBUTES = 15

CLOCK = "cluster/core/clock.py"
MAY_READ_ENVIRONMENT = {"cluster/config.py"}
MAY_SET_ENVIRONMENT = "kv_transfer/transports/"  # the one file that starts NIXL sets UCX's own variables
ENVIRONMENT = {"environ", "environb", "getenv", "putenv", "unsetenv"}


def _report(wrong: list[str]) -> None:
    assert not wrong, "\n" + "\n".join(wrong)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _calls(source: Source) -> list[tuple[str, ast.Call]]:
    return [(_dotted(node.func), node) for node in ast.walk(source.tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("files", [product, suite], ids=["product", "tests"])
def test_files_are_short(files: object) -> None:
    sources = product() if files is product else suite()
    lengths = {source.path: source.text.count("\n") for source in sources}
    _report([f"{path}: {lines} lines" for path, lines in lengths.items() if lines > MAX_FILE_LINES])


def test_functions_are_short() -> None:
    wrong = []
    for source in (*product(), *suite()):
        for function in source.functions():
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                wrong.append(f"{source.path}:{function.lineno} {function.name}: {lines} lines")
    _report(wrong)


def test_constructors_take_few_parameters() -> None:
    wrong = []
    for source in product():
        for function in source.functions():
            arguments = function.args
            count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1
            if function.name == "__init__" and count > MAX_CONSTRUCTOR_PARAMETERS:
                wrong.append(f"{source.path}:{function.lineno} takes {count} parameters")
    _report(wrong)


def test_classes_hold_few_attributes() -> None:
    wrong = []
    for source in product():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                names = _attributes(node)
                if len(names) > MAX_ATTRIBUTES:
                    wrong.append(f"{source.path}:{node.lineno} {node.name}: {len(names)} attributes")
    _report(wrong)


def _attributes(node: ast.ClassDef) -> set[str]:
    """What methods assign to `self`; fields of plain data classes are not state and do not count."""
    stores = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {n.attr for n in stores if isinstance(n.value, ast.Name) and n.value.id == "self"}


def test_only_the_config_loader_reads_the_environment() -> None:
    wrong = []
    for source in product():
        if source.path in MAY_READ_ENVIRONMENT or source.path.startswith(MAY_SET_ENVIRONMENT):
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and _dotted(node.value) == "os":
                wrong.append(f"{source.path}:{node.lineno} os.{node.attr}")
        imported = [(module, line) for module, line in source.imports() if module.removeprefix("os.") in ENVIRONMENT]
        wrong += [f"{source.path}:{line} {module}" for module, line in imported]
    _report(wrong)


def test_only_the_clock_reads_the_clock() -> None:
    wrong = []
    for source in product():
        if source.path == CLOCK:
            continue
        wrong += [f"{source.path}:{line} imports {name}" for name, line in source.imports() if name == "time"]
        for name, call in _calls(source):
            if name in ("datetime.now", "datetime.datetime.now", "datetime.utcnow", "date.today"):
                wrong.append(f"{source.path}:{call.lineno} calls {name}")
    _report(wrong)


def test_tests_never_sleep() -> None:
    wrong = []
    for source in suite():
        for name, call in _calls(source):
            yields = bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
            if name.endswith("sleep") and not yields:  # sleep(0) only lets others run
                wrong.append(f"{source.path}:{call.lineno} calls {name}")
    _report(wrong)


def test_only_the_command_line_prints() -> None:
    wrong = []
    for source in product():
        if not source.path.startswith("cluster/cli/"):
            wrong += [f"{source.path}:{call.lineno}" for name, call in _calls(source) if name == "print"]
    _report(wrong)


def test_nothing_unpickles_by_another_name() -> None:
    names = {"torch.load", "numpy.load", "np.load", "recv_pyobj", "send_pyobj"}
    wrong = []
    for source in product():
        for name, call in _calls(source):
            if name in names or name.rpartition(".")[2] in ("recv_pyobj", "send_pyobj"):
                wrong.append(f"{source.path}:{call.lineno} calls {name}")
    _report(wrong)


def test_public_signatures_say_what_they_take() -> None:
    wrong = []
    for source in product():
        for function in _public(source.tree):
            arguments = function.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            hints = [a.annotation for a in (*every, arguments.vararg, arguments.kwarg) if a is not None]
            for hint in (*hints, function.returns):
                names = {n.id for n in ast.walk(hint) if isinstance(n, ast.Name)} if hint is not None else set()
                if "Any" in names:
                    wrong.append(f"{source.path}:{function.lineno} {function.name} has Any in its signature")
    _report(wrong)


def _public(node: ast.Module | ast.ClassDef) -> list[Function]:
    found: list[Function] = []
    for child in node.body:
        if isinstance(child, Function) and not child.name.startswith("_"):
            found.append(child)
        elif isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            found += _public(child)
    return found
