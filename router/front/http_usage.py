"""GET /usage: what tenants used. An operator is told of all, a tenant of itself. JSON; CSV where `accept` says so."""

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.core.errors import InvalidRequest
from cluster.usage import Day, day_from, iso
from cluster.usage_report import csv_text, lines_of
from router.front.auth import Gate, tenant_of

_DEFAULT_DAYS = 31
_MOST_DAYS = 3660
_CSV = "text/csv"


async def answer_usage(request: HttpRequest, gate: Gate) -> Response:
    """Query: `since` and `until`, days as 2026-11-30, both included. Raises InvalidRequest, Unavailable."""
    tenant, ledger, settings = tenant_of(request.scope), gate.ledger, gate.usage
    until = min(_day(request, "until", ledger.today()), ledger.today() + 1)
    since = _day(request, "since", max(0, until - _DEFAULT_DAYS + 1))
    if not 0 <= until - since < _MOST_DAYS:
        raise InvalidRequest(f"until is not before since, nor {_MOST_DAYS} days later", param="since")
    days = await ledger.read(max(since, ledger.today() - settings.keep_days), until)
    mine = {
        day: {who: sums for who, sums in rows.items() if tenant.operator or who.tenant == tenant.name}
        for day, rows in days.items()
    }
    lines = lines_of(mine, settings)
    if _CSV in request.headers.get("accept", ""):
        return Response(csv_text(lines), media_type=f"{_CSV}; charset=utf-8; header=present")
    told = {
        "since": iso(since),
        "until": iso(until),
        "shared": ledger.shared,
        "rows": [line.values() for line in lines],
    }
    return Response(orjson.dumps(told), media_type="application/json")


def _day(request: HttpRequest, name: str, otherwise: Day) -> Day:
    given = request.query_params.get(name)
    if given is None:
        return otherwise
    try:
        return day_from(given)
    except ValueError:
        raise InvalidRequest("must be a day like 2026-11-30", param=name) from None
