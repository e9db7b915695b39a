"""What Ray is told through the environment, before it is imported: its only way for these settings."""

from pathlib import Path

import cluster
from cluster.config import environment
from cluster.core.config import ClusterConfig
from cluster.redis_url import parse_redis_url
from cluster.run_dir import RunDir

SOURCE_ROOT = str(Path(next(iter(cluster.__path__))).resolve().parent)
"""Where the packages are, for child processes that do not inherit our sys.path."""

NOT_FOR_PROGRAMS = ("RAY_", "OMP_NUM_THREADS", "PYTHONPATH")
"""What Ray sets for its workers and the programs must not inherit: its token, and one thread for every library."""

PROGRAM_VARIABLES = {
    "PYTHONPATH": SOURCE_ROOT,
    # gRPC's handlers run Python in a child between fork and exec, which kills about one in ten of uvloop's children.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
"""What every program finds in its environment, whoever starts it."""

OBJECT_STORE_BYTES = 78_643_200
"""The least Ray takes; nothing of ours is kept in it."""

GCS_ABSENCE_S = 86_400
"""How long Ray's processes go on without a GCS that will come back. Ray's own 60 s would end them, streams and all."""


def head_environment(run_dir: RunDir, config: ClusterConfig) -> dict[str, str]:
    """Variables for the head process; its Ray and the actors inherit them."""
    variables = ray_environment(run_dir, local=config.ray.address is None)
    variables["RAY_START_HOOK"] = "cluster.ray_launcher.start_hook"  # where `ray start` gets Redis' password
    if config.ray.redis_url is not None:
        variables |= {
            "RAY_REDIS_ADDRESS": parse_redis_url(config.ray.redis_url, "ray.redis_url").ray_address,
            "RAY_external_storage_namespace": run_dir.ray_namespace(),
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(GCS_ABSENCE_S),
        }
    return variables


def program_environment() -> dict[str, str]:
    """The environment of a program that this process starts."""
    return environment(PROGRAM_VARIABLES, without=NOT_FOR_PROGRAMS)


def ray_environment(run_dir: RunDir, *, local: bool) -> dict[str, str]:
    """Variables for everybody who talks to the cluster's Ray."""
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(run_dir.token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Idle workers in advance cost 100 MB each, and supervisors are all there ever are.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        # Ray's own out-of-memory killer would choose a supervisor, the one process that must stay.
        "RAY_memory_monitor_refresh_ms": "0",
        # Ray runs its workers at niceness 15, and programs inherit it: who serves people would wait for everybody else.
        "RAY_worker_niceness": "0",
        # An actor without GPUs keeps seeing them: its program uses them, Ray does not hand them out.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "PYTHONPATH": SOURCE_ROOT,
        "PYTHONWARNINGS": "ignore",
    }
    if local:
        # Named after the systems where it is the default: listen on the loopback interface only.
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return variables
