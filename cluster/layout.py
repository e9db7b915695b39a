"""Where a cluster's programs are and how they are started: what the actors of cluster/ray_launcher.py are made with."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.logs import setup_logging
from cluster.pipe import Role, role_of
from cluster.ray_environment import program_environment
from cluster.run_dir import RunDir
from cluster.supervisor import ProgramSpec


@dataclass(frozen=True, slots=True)
class Layout:
    """`modules` names each role's entry point. `folder` is the run directory: on every machine the same path, and on
    every machine its own content, with that machine's address."""

    folder: str
    modules: Mapping[Role, str]

    @property
    def run_dir(self) -> RunDir:
        return RunDir(Path(self.folder))

    def spec(self, name: str, node: str) -> ProgramSpec:
        """How a program is started on this machine: with our environment, less what Ray put into it."""
        role, run_dir = role_of(name), self.run_dir
        command = (sys.executable, "-m", self.modules[role], "--config", str(run_dir.config_file), "--name", name)
        variables = program_environment()
        return ProgramSpec(name, role, (*command, "--supervised"), variables, run_dir.log_file(name), node)

    def log_to_file(self, name: str) -> None:
        """Send this actor's own log where its program's goes."""
        log = self.run_dir.log_file(name).open("a", encoding="utf-8", buffering=1)
        config = self.run_dir.config()
        setup_logging(name, config.log_level, config.log_format, stream=log)
