"""Who may import whom (DESIGN §3), and which foreign library has its one file."""

import ast
import subprocess
import sys

import pytest

from tests.architecture.source import PACKAGES, ROOT, Source, product, top

ENGINE_BORDER = ("engine.layout", "engine.messages", "engine.wire")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "cluster.core": ("cluster.core",),
    "cluster": ("cluster",),
    "cluster.cli.sim": ("cluster", "simulation"),  # the command that runs it, and imports it when it is called
    "cluster.cli.chaos": ("cluster", "chaos"),
    "engine": ("engine", "cluster.core"),
    "kv_transfer": ("kv_transfer", "cluster", *ENGINE_BORDER),
    "prefill_worker": ("prefill_worker", "engine", "kv_transfer", "cluster"),
    "decode_worker": ("decode_worker", "engine", "kv_transfer", "cluster"),
    "router": ("router", "cluster"),
    "simulation": ("simulation", "router", "prefill_worker", "decode_worker", "engine", "kv_transfer", "cluster"),
    # starts a cluster and asks it over its public APIs; the tracer's reference is the judge
    "chaos": ("chaos", "cluster", "engine.messages", "engine.model.tracer"),
    "planner": ("planner", "cluster"),
}
ONE_FILE = {
    "ray": "cluster/ray_launcher.py",
    "redis": "cluster/redis_store.py",
    "opentelemetry": "router/front/otel.py",
}
NEVER = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "transformers"}
SERVERS = ("router", "prefill_worker", "decode_worker")


def _inside(module: str, allowed: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in allowed)


def _rule_for(source: Source) -> tuple[str, ...]:
    if source.module in MAY_IMPORT:
        return MAY_IMPORT[source.module]
    return MAY_IMPORT["cluster.core" if source.module.startswith("cluster.core") else top(source.module)]


def test_imports_go_one_way() -> None:
    wrong = []
    for source in product():
        allowed = _rule_for(source)
        for module, line in source.imports():
            # `from engine import layout` is listed as engine and engine.layout: the package itself is harmless
            is_ours = top(module) in PACKAGES and module not in PACKAGES
            if is_ours and not _inside(module, allowed) and not _inside(module.rpartition(".")[0], allowed):
                wrong.append(f"{source.path}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_rule_itself_sees_what_it_forbids() -> None:
    assert not _inside("engine.scheduler", MAY_IMPORT["kv_transfer"])
    assert not _inside("decode_worker.server", MAY_IMPORT["prefill_worker"])
    assert _inside("engine.layout.Layout", MAY_IMPORT["kv_transfer"])
    assert len(product()) > 20


@pytest.mark.parametrize("library", ONE_FILE)
def test_one_file_imports(library: str) -> None:
    files = {source.path for source in product() for module, _ in source.imports() if top(module) == library}
    assert files == {ONE_FILE[library]}


def test_one_file_imports_nixl() -> None:
    files = {source.path for source in product() for module, _ in source.imports() if top(module).startswith("nixl")}
    assert len(files) <= 1, files
    assert all(path.startswith("kv_transfer/transports/") for path in files)


def test_triton_is_loaded_for_a_gpu_alone() -> None:
    """Kernels import it; everything else reaches them, if at all, from within a function that has found a GPU."""
    wrong = []
    for source in product():
        at_once = {id(node) for node in source.tree.body}
        for node in ast.walk(source.tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            triton = any(top(name) == "triton" for name in names) and not source.path.startswith("engine/gpu/kernels/")
            early = any(_inside(name, ("engine.gpu",)) for name in names) and id(node) in at_once
            if triton or (early and not source.path.startswith("engine/gpu/")):
                wrong.append(f"{source.path} imports {names}")
    assert not wrong, "\n".join(wrong)


def test_no_pickle_and_no_test_dependency_in_the_product() -> None:
    wrong = [f"{s.path}:{line} {m}" for s in product() for m, line in s.imports() if top(m) in NEVER]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", SERVERS)
def test_servers_never_load_torch_or_ray(package: str) -> None:
    """Import every module of the package in a fresh interpreter and look at what came along."""
    modules = [source.module for source in product() if top(source.module) == package]
    assert modules
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'ray', 'nixl', 'transformers'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_only_the_router_makes_tokens_of_text() -> None:
    """The ids are the only truth about a prompt (FAULTS C27). A model that is pulled has its tokenizer made, once."""
    text = {"tokenizers", "jinja2"}
    users = {s.path for s in product() for m, _ in s.imports() if top(m) in text}
    assert users == {
        "router/front/chat.py",
        "router/front/template_sandbox.py",
        "router/front/tokenizer.py",
        "cluster/models/gguf_tokenizer.py",
    }


def test_the_engine_does_not_negotiate() -> None:
    """A plan is decided by one server and obeyed: no collective whose participants could disagree (FAULTS F09)."""
    names = ("torch.distributed", "mpi4py", "torch.multiprocessing")
    wrong = [f"{s.path}:{line} {m}" for s in product() for m, line in s.imports() if _inside(m, names)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", SERVERS)
def test_servers_know_neither_the_store_nor_the_controller(package: str) -> None:
    """What stores and reconciles counts can be away without a stream noticing: there is nothing to ask (FAULTS F05).

    A router asks Redis for tenants and their limits, through one file, and goes on without it (tests/contract/).
    """
    shared = ("cluster.store", "cluster.redis_store", "cluster.controller", "cluster.reconcile")
    by_module = {source.module: source for source in product() if source.module != "router.shared_store"}
    todo, seen = [source.module for source in product() if top(source.module) == package], set[str]()
    while todo:
        source = by_module.get(todo.pop())
        if source is not None and source.module not in seen:
            seen.add(source.module)
            todo += [module for module, _ in source.imports()]
    assert "cluster.program" in seen, "the walk goes through what a program is made of"
    assert not seen & set(shared)


def test_supervisors_and_the_command_line_load_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "import cluster.cli.main, cluster.controller, cluster.supervisor\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'nixl', 'transformers', 'ray'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
