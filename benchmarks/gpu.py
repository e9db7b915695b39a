"""`python -m benchmarks.gpu [--dry-run]`: everything that a machine with a GPU must show, in at most six minutes.

1. Every Triton kernel against plain torch on the GPU.
2. What the GPU can do: bandwidth of a copy, a large bfloat16 product. Against these: decode, prefill, attention and
   digests, of Llamas of 1 and 8 billion random weights.
3. KV between two processes through NIXL, proved by digests.
4. One prefill and one decode worker on the GPU, eight streams.
One table. A part that fails says so and the others go on (exit 1); without a GPU nothing is measured (exit 2).
`--dry-run` runs the same code with tiny shapes on a CPU, kernels in Triton's interpreter: figures of no meaning.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.machine import describe_machine, today
from benchmarks.report import head, publish
from cluster.core.clock import SystemClock

if TYPE_CHECKING:
    from benchmarks.gpu_models import Figure

RESULTS = Path(__file__).with_name("results")
BUDGET_S = 330.0  # no further figure is begun then: the longest takes some seconds
NO_GPU = 2
PARTS = ("kernels", "device", "alone", "transfer", "served", "model")
SERVED_SETTINGS = ("engine.pool_tokens=65536", "engine.chunk_tokens=2048", "engine.dtype=bfloat16")
DRY_SETTINGS = ("engine.pool_tokens=256", "engine.dtype=float32", "engine.kernels=triton", "engine.device=cpu")


class Page:
    """The table as it grows."""

    def __init__(self, budget_s: float, parts: Sequence[str]) -> None:
        """`parts`: the only ones to run; none named: all."""
        self._parts = parts
        self.figures: list[tuple[str, Figure]] = []
        self.failures: list[str] = []
        self._end = time.monotonic() + budget_s

    def left(self) -> bool:
        """Whether there is time for another figure."""
        return time.monotonic() < self._end

    def part(self, name: str, measure: Callable[[], Iterable["Figure"]]) -> None:
        """Add what `measure` gives, until it ends, fails or there is no time left."""
        if self._parts and name not in self._parts:
            return
        if not self.left():
            self.failures.append(f"{name}: left out, no time was left")
            return
        try:
            for figure in measure():
                self.figures.append((name, figure))
                print(f"{name}: {figure.what}: {figure.value:.4g} {figure.unit}", file=sys.stderr, flush=True)
        except Exception as error:  # the guard of this loop: what was measured before must not be lost
            self.failures.append(f"{name}: {type(error).__name__}: {error}")

    def text(self, title: str, machine: dict[str, str]) -> str:
        """Markdown."""
        lines = [f"# {title}", "", *head(machine), "", "| part | what | found | of what the GPU can do |"]
        lines.append("| --- | --- | --- | --- |")
        for name, figure in self.figures:
            floor = "" if figure.of_floor is None else f"{figure.of_floor:.0%}"
            lines.append(f"| {name} | {figure.what} | {figure.value:.4g} {figure.unit} | {floor} |")
        return "\n".join([*lines, "", *(f"- FAILED: {failure}" for failure in self.failures)]) + "\n"


def measure(device: torch.device, page: Page, *, dry: bool) -> None:
    """Every part in order."""
    from benchmarks.gpu_kernels import check_all
    from benchmarks.gpu_models import DRY, FULL, MODELS, TINY, Figure, kernel_figures, limits, llama, model_figures
    from benchmarks.gpu_wire import serve, transfer

    def checks() -> Iterable[Figure]:
        for check in check_all(device, dry=dry):
            if not check.ok:
                page.failures.append(f"kernels: {check.kernel} is off by {check.worst:.3g} times what is allowed")
            yield Figure(f"{check.kernel}, {check.cases} cases", check.worst, "of the tolerance")

    page.part("kernels", checks)
    floor, found = limits(device, dry=dry)
    page.part("device", lambda: found)
    size, sizes = (DRY, TINY) if dry else (FULL, MODELS)
    page.part("alone", lambda: kernel_figures(sizes["tiny" if dry else "8B"], size, floor, device))
    page.part("transfer", lambda: transfer(device, dry=dry))
    if dry:
        served = llama(32, 48, 1, 2, 1, 300, tied=True)
        page.part("served", lambda: serve(served, list(DRY_SETTINGS), (1, 20, 3), 1))
    else:
        served = llama(576, 1536, 30, 9, 3, 300, tied=True)
        page.part("served", lambda: serve(served, list(SERVED_SETTINGS), (32, 512, 64), 8))
    for name, config in sizes.items():  # last: an 8B's figures are the longest, and cut off first
        page.part("model", partial(model_figures, name, config, size, floor, device, page.left))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Checks and figures of a GPU.")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU, in Triton's interpreter")
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("torch finds no CUDA device here: nothing was measured (--dry-run goes through the motions)")
        return NO_GPU
    device = torch.device("cpu" if options.dry_run else "cuda:0")
    clock = SystemClock()
    machine = describe_machine(clock, "benchmarks.gpu", arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before kernels are imported, here and in workers
    else:
        torch.cuda.set_device(device)
        major, minor = torch.cuda.get_device_capability(device)
        machine["GPU"] = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    page = Page(BUDGET_S, options.only)
    measure(device, page, dry=options.dry_run)
    if options.dry_run:
        print(page.text("Dry run: nothing here is a figure", machine))
    else:
        figures = {"machine": machine, "failures": page.failures}
        rows = [{"part": name, **asdict(figure)} for name, figure in page.figures]
        publish(options.out, f"{today(clock)}-gpu", page.text("One GPU", machine), figures | {"figures": rows})
    return 1 if page.failures else 0


if __name__ == "__main__":
    sys.exit(main())
