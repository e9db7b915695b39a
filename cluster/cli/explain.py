"""`headrace explain`: why a recent request went where it went, as told by the router that served it."""

import json
import urllib.parse
from collections.abc import Sequence
from typing import TypedDict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.cli.web import NoAnswer, get
from cluster.config import API_KEY_VARIABLE, api_key_from_environment
from cluster.core.access import PublicTlsSettings
from cluster.core.errors import HeadraceError
from cluster.rpc import auth_metadata

ANSWER_S = 5.0
_FOUND = 200
_NOT_FOUND = 404
_UNAUTHENTICATED = 401


class Pair(TypedDict):
    """One pair that was compared."""

    decode: str
    prefill: str
    cost_ms: float
    terms_ms: dict[str, float]


class AttemptTold(TypedDict):
    """One attempt; times in milliseconds since the request was admitted."""

    decode: str
    prefill: list[str]
    local: bool
    placed_ms: float
    accepted_ms: float | None
    first_token_ms: float | None
    ended_ms: float | None
    outcome: str
    considered: list[Pair]


class Told(TypedDict):
    """What a router tells of a request (router/front/http_debug.py)."""

    id: str
    request: str
    arrived: str
    outcome: str
    ended_ms: float | None
    waiting_for: str | None
    prompt_tokens: int
    cached_tokens: int
    max_tokens: int
    samples: int
    kv_bytes: int
    transport: str | None
    timings_ms: dict[str, float]
    attempts: list[AttemptTold]


def find(name: str, routers: Sequence[str], tls: PublicTlsSettings | None = None) -> Told:
    """Ask the routers (base URLs) one after the other. Raises HeadraceError when none knows the request."""
    silent = []
    key = api_key_from_environment()
    headers = {} if key is None else dict(auth_metadata(key))
    for router in routers:
        url = f"{router}/debug/requests/{urllib.parse.quote(name, '')}"
        try:
            status, body = get(url, tls or PublicTlsSettings(), within_s=ANSWER_S, headers=headers)
        except NoAnswer as error:
            silent.append(f"{router} does not answer ({error})")
            continue
        if status == _FOUND:
            told: Told = json.loads(body)
            return told
        if status == _UNAUTHENTICATED:
            raise HeadraceError(f"{router} wants a tenant's key, in {API_KEY_VARIABLE}")
        if status != _NOT_FOUND:
            raise HeadraceError(f"{router} answers with {status}")
    asked = f"none of {len(routers)} routers knows" if len(routers) > 1 else "the router does not know"
    raise HeadraceError("; ".join([f"{asked} a recent request {name!r}", *silent]))


def show(told: Told, console: Console) -> None:
    """For people."""
    ended = "" if told["ended_ms"] is None else f" after {told['ended_ms']:.0f} ms"
    console.print(f"[bold]{escape(told['id'])}[/] ({escape(told['request'])}), {told['arrived']}")
    moved = f"{told['kv_bytes'] / 1e6:.2f} MB of KV moved{' over ' + told['transport'] if told['transport'] else ''}"
    cached, longest = told["cached_tokens"], f"{told['samples']} x {told['max_tokens']}"
    tokens = f"{told['prompt_tokens']} tokens in ({cached} cached), at most {longest} out"
    console.print(f"  {escape(told['outcome'])}{ended}: {tokens}, {moved}")
    if told["timings_ms"]:
        console.print("  " + ", ".join(f"{name} {value:.1f} ms" for name, value in told["timings_ms"].items()))
    if told["waiting_for"]:
        console.print(f"  waiting: {escape(told['waiting_for'])}")
    for number, attempt in enumerate(told["attempts"], start=1):
        _show_attempt(number, attempt, console)


def _show_attempt(number: int, attempt: AttemptTold, console: Console) -> None:
    who = "prefill by itself" if attempt["local"] else "prefill on " + ", else ".join(attempt["prefill"])
    marks = [
        f"{mark} at {at:.1f} ms"
        for mark, at in (
            ("placed", attempt["placed_ms"]),
            ("accepted", attempt["accepted_ms"]),
            ("first token", attempt["first_token_ms"]),
            ("ended", attempt["ended_ms"]),
        )
        if at is not None
    ]
    console.print(f"attempt {number}: {attempt['decode']}, {who}: {escape(attempt['outcome'])} ({', '.join(marks)})")
    console.print(costs(attempt["considered"]))


def costs(considered: Sequence[Pair]) -> Table:
    """The chosen pair and the next best ones, with the terms of their cost."""
    names = list(dict.fromkeys(name for pair in considered for name in pair["terms_ms"]))
    table = Table("", "decode", "prefill", "cost, ms", *names, box=None)
    for at, pair in enumerate(considered):
        terms = [f"{pair['terms_ms'][name]:.1f}" if name in pair["terms_ms"] else "-" for name in names]
        table.add_row("chosen" if at == 0 else "", pair["decode"], pair["prefill"], f"{pair['cost_ms']:.1f}", *terms)
    return table
