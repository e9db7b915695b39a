"""`headrace usage`: what tenants used and what it costs, as CSV, from the routers' admin ports."""

import json
import urllib.parse
from collections.abc import Sequence

from cluster.cli.web import NoAnswer, get
from cluster.config import API_KEY_VARIABLE, api_key_from_environment
from cluster.core.access import PublicTlsSettings
from cluster.core.errors import HeadraceError
from cluster.rpc import auth_metadata
from cluster.usage_report import Line, added, line_from

ANSWER_S = 10.0
_OK = 200
_BAD_REQUEST = 400
_UNAUTHENTICATED = 401


def fetch(routers: Sequence[str], since: str | None, until: str | None, tls: PublicTlsSettings) -> list[Line]:
    """From one router where they share a book, else from all of them (base URLs). Raises HeadraceError.

    Where no book is shared, what one router does not tell nobody else can: all fails then, and says which it was.
    """
    lines: list[Line] = []
    silent = []
    for router in routers:
        try:
            shared, told = _ask(router, since, until, tls)
        except NoAnswer as error:
            silent.append(f"{router} {error}")
            continue
        if shared:
            return told
        lines += told
    if silent:
        raise HeadraceError("; ".join(silent))
    return added(lines)


def _ask(router: str, since: str | None, until: str | None, tls: PublicTlsSettings) -> tuple[bool, list[Line]]:
    """Whether its book is shared, and what it tells. Raises NoAnswer when another router may know; HeadraceError."""
    given = {"since": since, "until": until}
    query = urllib.parse.urlencode({name: day for name, day in given.items() if day is not None})
    key = api_key_from_environment()
    headers = {} if key is None else dict(auth_metadata(key))
    try:
        status, body = get(f"{router}/usage?{query}", tls, within_s=ANSWER_S, headers=headers)
    except NoAnswer as error:
        raise NoAnswer(f"does not answer ({error})") from error
    if status == _UNAUTHENTICATED:
        raise HeadraceError(f"{router} wants a tenant's key, in {API_KEY_VARIABLE}")
    if status == _BAD_REQUEST:
        raise HeadraceError(json.loads(body)["error"]["message"])
    if status != _OK:
        raise NoAnswer(f"answers with {status}")  # its way to the book may be another one's no more
    told = json.loads(body)
    return bool(told["shared"]), [line_from(values) for values in told["rows"]]
