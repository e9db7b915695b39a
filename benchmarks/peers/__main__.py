"""`python -m benchmarks.peers --vllm VENV --llama VENV --openvino VENV --gguf FORMAT=PATH ...`: side by side."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvloop

from benchmarks.machine import describe_machine, today
from benchmarks.peers.plan import CAPACITY, LLAMA, LONG_PROMPTS, MANY, MIXED, OPENVINO, SINGLE, SIZES, prompt_name
from benchmarks.peers.report import Outcome, document, markdown
from benchmarks.peers.run import Options, SideBySide
from benchmarks.peers.subjects import KV_SPACE_GB, TUNED, Vllm
from benchmarks.peers.versions import nixl_delay_us, python_of, versions
from benchmarks.report import publish
from cluster.core.clock import SystemClock
from cluster.core.errors import HeadraceError
from cluster.models.pull import pull
from cluster.models.registry import KNOWN_MODELS
from cluster.models.store import default_cache, resolve

RESULTS = Path(__file__).parents[1] / "results"
FORMATS = {LLAMA: ("BF16", "Q8_0"), OPENVINO: ("Q8_0", "Q4_1")}
WORKS = (SINGLE, *map(prompt_name, LONG_PROMPTS), MANY, MIXED, CAPACITY)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 when it could not be run. What was measured until then is written either way."""
    given = _parse(arguments)
    clock = SystemClock()
    machine = describe_machine(clock, "benchmarks.peers", arguments)
    outcome = Outcome()
    failed = ""
    try:
        if given.model in KNOWN_MODELS:
            pull(given.model, default_cache())
        options = _options(given, outcome)
        uvloop.run(_until_stopped(SideBySide(options, outcome, clock)))
    except HeadraceError as error:
        failed = f"the comparison could not be run: {error}"
    except (KeyboardInterrupt, asyncio.CancelledError):
        failed = "stopped before the end"
    if failed:
        print(failed, file=sys.stderr)
        outcome.absent["the rest"] = failed
    if outcome.runs:
        size = SIZES[given.size]
        stem = f"{today(clock)}-{given.model.rstrip('/').rsplit('/', 1)[-1]}-peers-{size.name}"
        text = markdown(given.model, size, outcome, machine)
        publish(given.out, stem, text, document(given.model, size, outcome, machine))
    return 1 if failed else 0


async def _until_stopped(comparison: SideBySide) -> None:
    """SIGTERM ends what was started, as Ctrl-C does: peers are in process groups of their own."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await comparison.run()


def _options(given: argparse.Namespace, outcome: Outcome) -> Options:
    """Also tells `outcome` what the peers are, and which were not given. Raises ModelError."""
    settings = ", ".join(given.set) or "none"
    outcome.peers["Headrace's settings beside the defaults"] = settings
    how = None
    if given.vllm is None:
        outcome.absent["vllm"] = "not given (--vllm)"
    else:
        router = given.vllm_router or given.vllm / "bin" / "vllm-router"
        how = Vllm(given.vllm, router, given.vllm_policy, resolve(given.model, default_cache()))
        outcome.peers["vLLM"] = _about_vllm(how)
    return Options(given.model, SIZES[given.size], given.work, given.only, given.set, how, _libraries(given, outcome))


def _about_vllm(how: Vllm) -> str:
    told = [versions(python_of(how.folder), ("vllm", "torch", "nixl"))]
    told.append(versions(how.router.with_name("python"), ("vllm-router",)))
    delay = nixl_delay_us(how.folder)
    thread = "unknown" if delay is None else "spins, as it comes" if delay == 0 else f"rests {delay} us"
    told.append(f"router's policy {how.policy}; {KV_SPACE_GB} GB for KV; NIXL's progress thread {thread}")
    told.append(
        f"tuned ({' '.join(TUNED)}, of the split the prefill worker alone) for the interference, else as it comes"
    )
    return "; ".join(filter(None, told))


def _libraries(given: argparse.Namespace, outcome: Outcome) -> Mapping[str, tuple[Path, Path]]:
    files = {name: Path(path) for name, path in (each.split("=", 1) for each in given.gguf)}
    found = {}
    for kind, folder, package in (
        (LLAMA, given.llama, "llama-cpp-python"),
        (OPENVINO, given.openvino, "openvino-genai"),
    ):
        if folder is not None:
            outcome.peers[kind] = (versions(python_of(folder), (package,)) or "version unknown") + ", one thread"
        for form in FORMATS[kind]:
            if folder is None or form not in files:
                outcome.absent[f"{kind} {form}"] = (
                    f"not given (--{'gguf' if folder else kind.split('.')[0].split('-')[0]})"
                )
            else:
                found[f"{kind} {form}"] = (python_of(folder), files[form])
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Headrace beside its peers")
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="a virtual environment with vLLM's CPU build")
    parser.add_argument("--vllm-router", type=Path, metavar="PROGRAM", help="its router; by default in the same VENV")
    parser.add_argument("--vllm-policy", default="round_robin", help="of its router")
    parser.add_argument("--llama", type=Path, metavar="VENV", help="one with llama-cpp-python")
    parser.add_argument("--openvino", type=Path, metavar="VENV", help="one with openvino-genai")
    parser.add_argument("--gguf", action="append", default=[], metavar="FORMAT=PATH", help="BF16, Q8_0, Q4_1: weights")
    parser.add_argument("--model", default="smollm2-135m", help="a known name or a Hugging Face folder")
    parser.add_argument("--size", choices=SIZES, default="default", help="smoke: a few requests, to see that it works")
    parser.add_argument("--work", action="append", default=[], choices=WORKS, help="this one alone; may be repeated")
    parser.add_argument("--only", action="append", default=[], metavar="SYSTEM", help="this system alone, repeatable")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of Headrace")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
