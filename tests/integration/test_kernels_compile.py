"""Every Triton kernel compiles for GPUs of 2020 and 2022, and stays within their registers and shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = 99 << 10  # what a program may have on the smallest of them
SPILLED = 128
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.verify
def test_every_kernel_compiles_without_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.integration.kernel_compiler"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["kernel"] for line in made} == {"_decode", "_merge", "_prefill", "_heads", "_add_norm", "_digest"}
    assert [line for line in made if line["shared"] > SHARED or line["spilled"] > SPILLED] == []
