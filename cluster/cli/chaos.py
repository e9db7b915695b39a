"""`headrace chaos`: real processes, killed and stopped under load; the exit code says whether all invariants held."""

import logging
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cluster.cli.start import ensure_model
from cluster.core.config import ClusterConfig

Minutes = Annotated[float, typer.Option("--minutes", min=0.1, help="how long processes are disturbed")]
Seed = Annotated[int, typer.Option("--seed", help="draws the load and the faults")]
Model = Annotated[str, typer.Option("--model", help="tracer, or a model to run in float32")]
Tcp = Annotated[bool, typer.Option("--tcp", help="move KV over TCP (transport.require=tcp)")]
Pool = Annotated[int, typer.Option(min=1, max=16)]
Clients = Annotated[int, typer.Option("--clients", min=1, help="requests in flight")]
Rules = Annotated[bool, typer.Option(help="ask for penalties, grammars and several prompts as well")]
Logs = Annotated[Path | None, typer.Option("--logs", help="folder for the logs of all programs")]


def chaos(
    minutes: Minutes = 3.0,
    seed: Seed = 7,
    model: Model = "tracer",
    tcp: Tcp = False,
    prefill: Pool = 2,
    decode: Pool = 2,
    routers: Pool = 2,
    clients: Clients = 10,
    rules: Rules = True,
    logs: Logs = None,
) -> None:
    """Kill, stop and restart the processes of a local cluster at random, under load, and check every answer."""
    from chaos.run import run_chaos  # wanted by this command alone
    from chaos.settings import ChaosSettings

    out, err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    logging.getLogger("cluster.supervisor").setLevel(logging.ERROR)  # that programs end is the point here
    model = ensure_model(ClusterConfig(model=model), err).model
    settings = ChaosSettings(60 * minutes, seed, model, tcp, (prefill, decode, routers), clients, rules=rules)
    folder = logs or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    report = run_chaos(settings, folder, lambda line: err.print(escape(line), style="dim"))
    for line in report.lines():
        out.print(escape(line))
    out.print(f"logs: {folder}", style="dim")
    if not report.ok:
        raise typer.Exit(1)
