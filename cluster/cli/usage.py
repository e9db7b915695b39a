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
    """From one router where they share a book, else from all of them (base URLs). Raises HeadraceError."""
    lines: list[Line] = []
    for router in routers:
        shared, told = _ask(router, since, until, tls)
        if shared:
            return told
        lines += told
    return added(lines)


def _ask(router: str, since: str | None, until: str | None, tls: PublicTlsSettings) -> tuple[bool, list[Line]]:
    given = {"since": since, "until": until}
    query = urllib.parse.urlencode({name: day for name, day in given.items() if day is not None})
    key = api_key_from_environment()
    headers = {} if key is None else dict(auth_metadata(key))
    try:
        status, body = get(f"{router}/usage?{query}", tls, within_s=ANSWER_S, headers=headers)
    except NoAnswer as error:
        raise HeadraceError(f"{router} does not answer ({error})") from error
    if status == _UNAUTHENTICATED:
        raise HeadraceError(f"{router} wants a tenant's key, in {API_KEY_VARIABLE}")
    if status == _BAD_REQUEST:
        raise HeadraceError(json.loads(body)["error"]["message"])
    if status != _OK:
        raise HeadraceError(f"{router} answers with {status}")
    told = json.loads(body)
    return bool(told["shared"]), [line_from(values) for values in told["rows"]]
