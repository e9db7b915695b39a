"""`headrace`: bring a cluster up and down, look at it, ask it, fetch models. Errors are one readable line."""

import json
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.cli import ask as asking
from cluster.cli import chaos as disturbing
from cluster.cli import configuration, machine
from cluster.cli import explain as explaining
from cluster.cli import keys as making_keys
from cluster.cli import sim as simulating
from cluster.cli import usage as telling_usage
from cluster.cli.bench import bench
from cluster.cli.operate import client_of, sizes_of, wait_for_successor
from cluster.cli.reach import CaFile, CertFile, KeyFile, ServerName, asked_tls, grpc_tls, public_tls
from cluster.cli.show import routers, show_urls, status_json, status_table, watch
from cluster.cli.start import (
    Started,
    ensure_model,
    pull_model,
    running_cluster,
    start_cluster,
    stop_running,
)
from cluster.config import cache_home_from_environment, load_config, with_secrets_from_environment
from cluster.controller import ClusterStatus
from cluster.core.access import PublicTlsSettings
from cluster.core.addresses import EVERY_INTERFACE
from cluster.core.config import ClusterConfig
from cluster.core.errors import ConfigError, HeadraceError
from cluster.models.store import default_cache, list_models
from cluster.run_dir import RunDir, run_dir_of
from cluster.tls import ClientTls, named_tls
from cluster.usage_report import csv_text

FIRST_QUESTION = (
    "A water mill needs a steady stream. A weir across the river holds the water back, and an open channel called the "
    "headrace leads it from the weir to the wheel. The wheel turns the millstones, and the water leaves through a "
    "second channel, the tailrace, and joins the river again below the mill. When the river is low, the miller closes "
    "a gate in the headrace and waits until the pond behind the weir has filled. "
    "In one sentence: what does the headrace do?"
)
"""Long enough (`router.local_max_tokens`) that a decode worker does not simply prefill it by itself."""


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
model = typer.Typer(no_args_is_help=True, help="Models on this machine.")
app.add_typer(model, name="model")
app.add_typer(bench, name="bench")
app.command("sim")(simulating.sim)
app.command("chaos")(disturbing.chaos)
app.command("node")(machine.node)
app.command("leave")(machine.leave)
app.command("key")(making_keys.key)
app.command("config")(configuration.config)

File = Annotated[Path | None, typer.Option("--file", "-f", help="cluster.yaml; defaults apply without one")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="key=value, for example engine.dtype=float32")]
Root = Annotated[Path | None, typer.Option("--root", help="where run directories are (~/.headrace)")]
Name = Annotated[str, typer.Option("--name", help="which cluster")]
Text = Annotated[str, typer.Argument(help="what to ask")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens")]
Temperature = Annotated[float | None, typer.Option("--temperature")]


def _out() -> Console:
    return Console()


def _err() -> Console:
    return Console(stderr=True)


@app.command()
def up(
    file: File = None,
    settings: Settings = None,
    root: Root = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="return when it is ready")] = False,
    question: Annotated[str | None, typer.Option("--ask", help="ask one question when it is ready")] = None,
) -> None:
    """Start a cluster. Stays in the foreground until Ctrl-C, then shuts everything down, unless detached."""
    config = with_secrets_from_environment(load_config(file, settings or ()))
    run_dir = run_dir_of(root, config.name)
    config = ensure_model(config, _err())
    if not detach:
        _foreground(config, run_dir, question)
        return
    started = start_cluster(config, run_dir, _err(), tied=False)
    show_urls(started.status, _out())
    _ask_first(started.status, question, config.tls.public)


@app.command()
def run(
    file: File = None,
    settings: Settings = None,
    root: Root = None,
    question: Annotated[str, typer.Option("--ask")] = FIRST_QUESTION,
) -> None:
    """Start a cluster, ask it one question, show the answer with its timings, stay until Ctrl-C."""
    config = with_secrets_from_environment(load_config(file, settings or ()))
    _foreground(ensure_model(config, _err()), run_dir_of(root, config.name), question)


@app.command()
def down(name: Name = "headrace", root: Root = None) -> None:
    """Stop a cluster: every program in order, then Ray."""
    stopped = stop_running(run_dir_of(root, name))
    _out().print(f"{name} is stopped" if stopped else f"{name} was not running")


@app.command()
def status(
    name: Name = "headrace",
    root: Root = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
    watching: Annotated[bool, typer.Option("--watch", "-w", help="stay, and show every change")] = False,
) -> None:
    """What runs, where, and since how many restarts. Exit code 1 when not everything is ready."""
    if watching:
        with client_of(run_dir_of(root, name)) as client:
            watch(client.status, _out())
    now = _status(run_dir_of(root, name))
    if as_json:
        print(status_json(now))
    else:
        _out().print(status_table(now))
        if now.problem:
            _err().print(f"[red]{escape(now.problem)}[/]")
    if not now.ready:
        raise typer.Exit(1)


@app.command()
def scale(
    sizes: Annotated[list[str], typer.Argument(help="prefill=3 decode=2, or simply: decode 2")],
    name: Name = "headrace",
    root: Root = None,
) -> None:
    """Change how many programs of one or more roles there should be; what has to go drains first."""
    counts = sizes_of(sizes)
    with client_of(run_dir_of(root, name)) as client:
        client.scale(counts)
    _out().print(", ".join(f"{role}: {count}" for role, count in counts.items()) + " wanted")


@app.command()
def drain(
    program: Annotated[str, typer.Argument(help="for example decode-0; see `headrace status`")],
    name: Name = "headrace",
    root: Root = None,
) -> None:
    """Let one program finish or hand over its work, end it and start it anew; returns when the new one is ready.

    One program after the other is a rolling restart that no request notices.
    """
    with client_of(run_dir_of(root, name)) as client:
        client.drain(program)
        _out().print(f"{program} has drained")
        if wait_for_successor(client.status, program):
            _out().print(f"{program} is ready again")


@app.command()
def generate(
    text: Text,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template")] = False,
    name: Name = "headrace",
    root: Root = None,
    address: Annotated[str | None, typer.Option("--address", help="host:port of a router's gRPC server")] = None,
    tls: Annotated[bool, typer.Option("--tls", help="TLS, believing whom everybody believes")] = False,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    server_name: ServerName = None,
) -> None:
    """Ask one question over gRPC and stream the answer. A tenant's key is taken from HEADRACE_API_KEY."""
    run_dir = run_dir_of(root, name)
    question = asking.Question(text, raw, max_tokens, temperature)
    asked = asked_tls(ca_file, cert_file, key_file, server_name)
    settings = public_tls(run_dir, asked, given=address is not None)
    _ask(question, address or _router_address(run_dir), grpc_tls(settings, encrypted=tls or asked is not None))


@app.command()
def explain(
    request: Annotated[str, typer.Argument(help="the x-request-id of its answer, or the router's own id")],
    name: Name = "headrace",
    root: Root = None,
    address: Annotated[str | None, typer.Option("--address", help="base URL of a router's HTTP server")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    server_name: ServerName = None,
) -> None:
    """Why a recent request went where it went, and what became of it: pairs, their costs, times, outcomes."""
    run_dir = run_dir_of(root, name)
    asked = asked_tls(ca_file, cert_file, key_file, server_name)
    told = explaining.find(request, *_reach(run_dir, address, _router_urls, asked))
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        explaining.show(told, _out())


@app.command()
def usage(
    since: Annotated[str | None, typer.Option("--since", help="first day, as 2026-11-30 (a month ago)")] = None,
    until: Annotated[str | None, typer.Option("--until", help="last day (today); days are those of UTC")] = None,
    name: Name = "headrace",
    root: Root = None,
    address: Annotated[str | None, typer.Option("--address", help="base URL of a router's admin port")] = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    server_name: ServerName = None,
) -> None:
    """What each tenant used on each day, and what it costs, as CSV. Tokens, and characters beside them."""
    run_dir = run_dir_of(root, name)
    asked = asked_tls(ca_file, cert_file, key_file, server_name)
    routers, tls = _reach(run_dir, address, _admin_urls, asked)
    sys.stdout.write(csv_text(telling_usage.fetch(routers, since, until, tls)))


@model.command("pull")
def model_pull(name: Annotated[str, typer.Argument(help="a known model; see `headrace model list`")]) -> None:
    """Fetch a known model and convert it to a Hugging Face folder in the user's cache."""
    _out().print(str(pull_model(name, _err())), soft_wrap=True)


@model.command("list")
def model_list() -> None:
    """The known models, and which are here."""
    table = Table("name", "size", "licence", "what it is", box=None)
    for each in list_models(default_cache(cache_home_from_environment())):
        size = f"{each.size_bytes / 1e6:.0f} MB" if each.folder else "not pulled"
        table.add_row(each.name, size, each.licence, each.description)
    _out().print(table)


def _foreground(config: ClusterConfig, run_dir: RunDir, question: str | None) -> None:
    """Up, ask, wait for Ctrl-C or SIGTERM, down. Raises StartFailed when the cluster ends by itself."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell starts background jobs with SIGINT ignored
        signal.signal(number, _interrupt)
    try:
        with running_cluster(config, run_dir, _err()) as started:
            show_urls(started.status, _out())
            _ask_first(started.status, question, config.tls.public)
            _out().print("Ctrl-C stops it.", style="dim")
            code = _wait_for_end(started)
    except KeyboardInterrupt:
        return
    raise HeadraceError(f"the cluster ended by itself ({code}); see {run_dir.log_file('head')}")


def _wait_for_end(started: Started) -> int:
    """Blocks while the cluster runs; what it relays meanwhile is read and dropped, so that it never waits for us."""
    assert started.head.stdout is not None
    threading.Thread(target=started.head.stdout.read, daemon=True).start()
    return started.head.wait()


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _ask_first(now: ClusterStatus, question: str | None, tls: PublicTlsSettings) -> None:
    if question is None:
        return
    if not (ready := routers(now)):
        raise ConfigError("router.replicas: there is no router to ask")
    _out().print(f"\n[bold]{escape(question)}[/]")
    _ask(asking.Question(question, temperature=0.0, max_tokens=128), ready[0].address, named_tls(tls))


def _ask(question: asking.Question, address: str, tls: ClientTls | None) -> None:
    def write(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    answer = asking.ask(question, address, write, tls)
    write("\n")
    asking.show_timings(answer, _err())


def _router_address(run_dir: RunDir) -> str:
    """From the configuration where it fixes address and port (a Ray client takes seconds to connect), else from the
    cluster: one that listens on every interface may be on another machine."""
    config = run_dir.config()
    known = config.router.host not in EVERY_INTERFACE
    if known and config.router.grpc_port and (config.router.replicas == 1 or config.router.share_ports):
        return f"{config.router.host}:{config.router.grpc_port}"
    if not (ready := routers(_status(run_dir))):
        raise HeadraceError("no router is ready; see `headrace status`")
    return ready[0].address


def _reach(
    run_dir: RunDir, address: str | None, found: Callable[[RunDir], list[str]], asked: PublicTlsSettings | None
) -> tuple[list[str], PublicTlsSettings]:
    """Base URLs of routers, the given one or those that are found here, and how they are asked."""
    routers = [address.rstrip("/")] if address else found(run_dir)
    return routers, public_tls(run_dir, asked, given=address is not None)


def _router_urls(run_dir: RunDir) -> list[str]:
    """Of every router, as `_router_address` finds one."""
    config = run_dir.config()
    known = config.router.host not in EVERY_INTERFACE
    if known and config.router.http_port and config.router.replicas == 1 and not config.router.share_ports:
        scheme = "http" if config.tls.public.cert_file is None else "https"
        return [f"{scheme}://{config.router.host}:{config.router.http_port}"]
    urls = [router.http for router in routers(_status(run_dir)) if router.http]
    if not urls:
        raise HeadraceError("no router is ready; see `headrace status`")
    return urls


def _admin_urls(run_dir: RunDir) -> list[str]:
    """Of every router."""
    urls = [router.admin for router in routers(_status(run_dir)) if router.admin]
    if not urls:
        raise HeadraceError("no router is ready; see `headrace status`")
    return urls


def _status(run_dir: RunDir) -> ClusterStatus:
    with client_of(run_dir) as client:
        return client.status()


def main() -> None:
    """The entry point: whatever goes wrong is one line on stderr and an exit code that is not 0."""
    try:
        app()  # handles its own usage errors, and always leaves by SystemExit
    except HeadraceError as error:
        _err().print(f"[bold red]headrace:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
