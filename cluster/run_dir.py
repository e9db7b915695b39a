"""The folder of one running cluster, `~/.headrace/<name>/`: what `up` writes and every other command reads.

config.yaml   what every program is started with      secret        the cluster secret, mode 0600
desired.json  the desired counts (without Redis)      ray_token     Ray's token, mode 0600
workers.json  the workers a router last heard of      ray_namespace the name of Ray's tables in Redis
logs/         one file per program                    lock          held by the head process while the cluster runs
ready/        one empty file per program of this machine that takes calls
"""

import fcntl
import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cluster.config import dump_config, parse_config
from cluster.core.config import ClusterConfig
from cluster.core.errors import ConfigError
from cluster.secret import create_secret, store_secret


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths below `folder`, and what is read and written there."""

    folder: Path

    @property
    def config_file(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def secret_file(self) -> Path:
        return self.folder / "secret"

    @property
    def token_file(self) -> Path:
        return self.folder / "ray_token"

    @property
    def desired_file(self) -> Path:
        return self.folder / "desired.json"

    @property
    def workers_file(self) -> Path:
        return self.folder / "workers.json"

    @property
    def address_file(self) -> Path:
        """Ray's address, while it runs."""
        return self.folder / "ray_address"

    @property
    def _ray_folder_file(self) -> Path:
        return self.folder / "ray_folder"

    def log_file(self, name: str) -> Path:
        """A file of its own, or the one that all programs of this machine write to (`send_logs_to`)."""
        return self._common_log if self._common_log.is_symlink() else self.folder / "logs" / f"{name}.log"

    @property
    def _common_log(self) -> Path:
        return self.folder / "logs" / "all"

    def send_logs_to(self, target: str) -> None:
        """Let programs log to `target`, until the directory is prepared anew."""
        self._common_log.unlink(missing_ok=True)
        self._common_log.symlink_to(target)

    @property
    def leaving_file(self) -> Path:
        """There since `headrace leave`: that Ray ends on this machine is then as it should be."""
        return self.folder / "leaving"

    def mark_ready(self, name: str, ready: bool) -> None:
        """Leave a file in `ready/` while the program takes calls: a pod's readiness probe looks there."""
        mark = self.folder / "ready" / name
        if ready:
            mark.touch()
        else:
            mark.unlink(missing_ok=True)

    def prepare(self, config: ClusterConfig, secret: str | None) -> ClusterConfig:
        """Write everything the programs need; `secret` replaces the file's. Returns the configuration they will read.

        The desired counts and the workers of an earlier run are dropped: `up` says what there should be.
        Raises ConfigError.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.folder / "logs").mkdir(exist_ok=True)
            self._common_log.unlink(missing_ok=True)
            shutil.rmtree(self.folder / "ready", ignore_errors=True)
            (self.folder / "ready").mkdir()
            self.desired_file.unlink(missing_ok=True)
            self.workers_file.unlink(missing_ok=True)
            self.leaving_file.unlink(missing_ok=True)
            self.clear_ray()
            create_secret(self.token_file)
            if secret is not None:
                store_secret(self.secret_file, secret)
            elif config.secret_file is None:
                create_secret(self.secret_file)
            if config.secret_file is None or secret is not None:
                config = config.model_copy(update={"secret_file": str(self.secret_file)})
            if config.router.workers_file is None:
                router = config.router.model_copy(update={"workers_file": str(self.workers_file)})
                config = config.model_copy(update={"router": router})
            self.config_file.write_text(dump_config(config), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write to {self.folder}: {error}") from error
        return config

    def config(self) -> ClusterConfig:
        """What the cluster runs with. Raises ConfigError when it never ran."""
        try:
            return parse_config(self.config_file.read_text(encoding="utf-8"), str(self.config_file))
        except OSError as error:
            raise ConfigError(f"no cluster has been started here: {error}") from error

    def ray_address(self) -> str | None:
        """Where Ray answers; None when nothing runs."""
        return self.address_file.read_text(encoding="utf-8") if self.address_file.exists() else None

    def ray_namespace(self) -> str:
        """What this folder's Ray calls its tables in Redis, always the same: what a killed head left is found again.

        The random part keeps clusters of one name on several machines apart.
        """
        file = self.folder / "ray_namespace"
        if not file.exists():
            file.write_text(f"headrace-{self.config().name}-{secrets.token_hex(4)}", encoding="ascii")
        return file.read_text(encoding="ascii")

    def ray_folder(self) -> Path:
        """A new folder for Ray's sockets and logs, below the system's temporary one: socket paths must be short."""
        folder = Path(tempfile.mkdtemp(prefix="headrace-"))
        self._ray_folder_file.write_text(str(folder), encoding="utf-8")
        return folder

    def clear_ray(self) -> None:
        """Forget a Ray that has ended, however it did."""
        self.address_file.unlink(missing_ok=True)
        if self._ray_folder_file.exists():
            shutil.rmtree(self._ray_folder_file.read_text(encoding="utf-8"), ignore_errors=True)
            self._ray_folder_file.unlink(missing_ok=True)

    def hold(self) -> IO[str] | None:
        """Take the lock and write our pid into it; None when another process has it. Closing the file lets it go."""
        file = (self.folder / "lock").open("a+", encoding="ascii")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        return file

    def holder(self) -> int | None:
        """The pid of the head process, None when there is none."""
        try:
            with (self.folder / "lock").open("r", encoding="ascii") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return int(file.read() or "0") or None
        except FileNotFoundError:
            return None
        return None


def default_root() -> Path:
    """Where run directories are."""
    return Path.home() / ".headrace"


def run_dir_of(root: Path | None, name: str) -> RunDir:
    """The run directory of the cluster `name`; below `~/.headrace` without a root."""
    return RunDir((root or default_root()).expanduser().resolve() / name)
