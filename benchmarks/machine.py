"""Where and when figures were measured: processor, cores, versions, load, commit."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cluster.core.clock import Clock

LIBRARIES = ("torch", "nixl", "grpcio", "uvicorn", "numpy", "tokenizers")


def describe_machine(clock: Clock, module: str, arguments: Sequence[str] | None = None) -> dict[str, str]:
    """Label -> value, in the order they are shown. `arguments` of the command `python -m module`; None: this one's."""
    load = os.getloadavg()
    busy = " (other work was running: lean on ratios)" if load[0] > len(_cores()) / 4 else ""
    return {
        "date": f"{datetime.fromtimestamp(clock.wall(), UTC):%Y-%m-%d %H:%M} UTC",
        "command": shlex.join(["python", "-m", module, *(sys.argv[1:] if arguments is None else arguments)]),
        "commit": _commit(),
        "processor": _processor(),
        "cores": f"{len(_cores())} of {os.cpu_count()}",
        "load average before": " ".join(f"{value:.2f}" for value in load) + busy,
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {found}" for name in LIBRARIES if (found := _version(name))),
    }


def today(clock: Clock) -> str:
    """The date in file names."""
    return f"{datetime.fromtimestamp(clock.wall(), UTC):%Y-%m-%d}"


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _processor() -> str:
    """Model name, and what it can do for 16-bit floats."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.partition(":")[::2] for line in text.splitlines() if ":" in line)
    values = {name.strip(): value.strip() for name, value in fields.items()}
    flags = set(values.get("flags", values.get("Features", "")).split())
    able = [name for name in ("avx512_bf16", "amx_bf16", "bf16") if name in flags]
    return ", ".join([values.get("model name", platform.machine()), *able])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    root = Path(__file__).resolve().parents[1]
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return (head.stdout.strip() or "unknown") + (" with local changes" if changed.stdout.strip() else "")
