"""`headrace node` and `headrace leave`: one machine of a cluster that spans several, and how it goes."""

import signal
import threading
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console

from cluster.cli.operate import client_of
from cluster.cli.start import ensure_model
from cluster.config import load_config, with_secrets_from_environment
from cluster.core.errors import HeadraceError
from cluster.node import Kind, Node, run_node
from cluster.pipe import MODULES
from cluster.run_dir import RunDir, run_dir_of


def node(
    kind: Annotated[Kind, typer.Argument(help="the head, or the role whose programs find a place here")],
    ray_options: Annotated[list[str] | None, typer.Argument(help="after `--`: given to `ray start`")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="cluster.yaml, the same on all machines")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value; this machine's host=ADDRESS")] = None,
    places: Annotated[int, typer.Option("--places", min=1, help="programs of the role that run here at most")] = 1,
    root: Annotated[Path | None, typer.Option("--root", help="where run directories are (~/.headrace)")] = None,
) -> None:
    """Be one machine of a cluster: its head, or a place for programs of one pool. Stays until SIGTERM, then leaves."""
    config = with_secrets_from_environment(load_config(file, settings or ()))
    run_dir = run_dir_of(root, config.name)
    if kind != "head":
        config = ensure_model(config, Console(stderr=True))
    run_node(Node(kind, places, tuple(ray_options or ()), MODULES), config, run_dir)


def leave(
    name: Annotated[str, typer.Option("--name", help="which cluster")] = "headrace",
    root: Annotated[Path | None, typer.Option("--root", help="where run directories are (~/.headrace)")] = None,
    after: Annotated[float, typer.Option("--after", min=0, help="seconds to wait first: clients are sent away")] = 0,
) -> None:
    """Drain the programs of this machine and take no more: they start again where there is a place."""
    run_dir = run_dir_of(root, name)
    run_dir.config()  # a wrong name is told before anything is done
    run_dir.leaving_file.touch()
    if after:
        threading.Event().wait(after)
    try:
        with client_of(run_dir) as client:
            names = client.leave()
    except HeadraceError as error:
        typer.echo(f"the controller cannot help: {error}; stopping what runs here", err=True)
        names = _stop_programs(run_dir)
    typer.echo(f"drained: {', '.join(names) or 'nothing runs here'}")


def _stop_programs(run_dir: RunDir) -> list[str]:
    """SIGTERM to the programs themselves, and wait until they have drained.

    Their supervisors start them again; but this machine is about to go, with its supervisors.
    """
    file = str(run_dir.config_file)
    programs = [each for each in psutil.process_iter(["cmdline"]) if _runs_from(each.info["cmdline"] or [], file)]
    names = [each.info["cmdline"][each.info["cmdline"].index("--name") + 1] for each in programs]
    for each in programs:
        each.send_signal(signal.SIGTERM)
    psutil.wait_procs(programs, run_dir.config().timing.supervisor_stop_s)
    return sorted(names)


def _runs_from(command: list[str], config_file: str) -> bool:
    return "--supervised" in command and "--name" in command and config_file in command
