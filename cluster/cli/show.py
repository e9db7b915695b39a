"""A cluster's status for people (a table) and for programs (JSON)."""

from dataclasses import replace

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.cli.operate import Look
from cluster.controller import ClusterStatus
from cluster.pipe import Ready

_COLOUR = {"ready": "green", "starting": "yellow", "waiting": "red", "stopped": "dim"}

_LOOK_S = 10.0


def routers(status: ClusterStatus) -> list[Ready]:
    """The routers that can take calls."""
    return [program.ready for program in status.programs if program.role == "router" and program.ready is not None]


def status_table(status: ClusterStatus) -> Table:
    """One line a program."""
    table = Table("program", "state", "address", "processes", "restarts", box=None)
    for program in status.programs:
        ready = program.ready
        state = "stopping" if program.name in status.stopping else program.state
        address = (ready.http or ready.address) if ready else _last_exit(program.last_exit)
        pids = ", ".join(map(str, ready.pids)) if ready else str(program.pid or "-")
        colour = _COLOUR.get(state, "yellow")
        table.add_row(program.name, f"[{colour}]{state}[/]", address, pids, str(program.restarts))
    return table


def _last_exit(code: int | None) -> str:
    return "-" if code is None else f"last exit code {code}"


def watch(look: Look, console: Console) -> None:
    """The table again whenever something changes, in place on a terminal. Until Ctrl-C, or the cluster has gone."""
    now, version = None, -1
    with Live(console=console, auto_refresh=False) as live:
        while True:
            before, now = now, look(version, _LOOK_S)
            version = now.version
            if before is not None and replace(before, version=version, desired=now.desired) == now:
                continue
            shown = Group(status_table(now), Text(now.problem or "", style="red"))
            if console.is_terminal:
                live.update(shown, refresh=True)
            else:  # a file or a pipe: one table after the other
                console.print(shown)


def status_json(status: ClusterStatus) -> str:
    """Everything there is, in stable order."""
    return msgspec.json.format(msgspec.json.encode({"ready": status.ready, **msgspec.to_builtins(status)})).decode()


def show_urls(status: ClusterStatus, console: Console) -> None:
    """Where clients go, and who looks after it."""
    for router in routers(status):
        where = f"HTTP {router.http or '-'}  gRPC {router.address}  admin {router.admin or '-'}"
        console.print(f"[bold green]{router.name}[/] is ready: {where}")
