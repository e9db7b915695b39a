"""The committed gRPC stubs are what `make proto` writes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

pytest.importorskip("grpc_tools", reason="grpcio-tools, which generates stubs, is a development dependency")


def test_stubs_are_fresh(tmp_path: Path) -> None:
    protos = sorted(path.stem for path in (ROOT / "proto").glob("*.proto"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = next(line for line in makefile.splitlines() if line.startswith("PROTOS")).partition(":=")[2].split()
    assert sorted(listed) == protos
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Icluster/stubs=proto", f"--python_out={tmp_path}"]
    command += [f"--grpc_python_out={tmp_path}", f"--mypy_out=quiet:{tmp_path}", f"--mypy_grpc_out=quiet:{tmp_path}"]
    command += [f"cluster/stubs/{name}.proto" for name in protos]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, cwd=ROOT, check=True, timeout=60, env={**os.environ, "PATH": path})
    generated = {file.name: file.read_text() for file in (tmp_path / "cluster/stubs").iterdir()}
    committed = {file.name: file.read_text() for file in (ROOT / "cluster/stubs").glob("*_pb2*")}
    assert generated.keys() == committed.keys()
    stale = [name for name, text in generated.items() if committed[name] != text]
    assert not stale, f"run `make proto`: {stale}"
