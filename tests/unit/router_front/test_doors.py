"""Which routes are behind which of a router's two HTTP listeners (FAULTS S05): no path of the one is at the other."""

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from router.front.auth import OPEN
from router.web import ADMIN, AdminRoutes, ClientRoutes

INFERENCE = ["/v1/chat/completions", "/v1/models", "/tokenize", "/openapi.json"]
BOTH = [*sorted(OPEN - ADMIN), "/debug/requests/one"]


async def routed(door: type[ClientRoutes] | type[AdminRoutes], path: str) -> str:
    """The path that the app behind the door is given."""
    given = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        given.append(scope["path"])

    async def nothing(*_: object) -> None:
        raise AssertionError("nobody says a word")

    listener: ASGIApp = door(app)
    await listener({"type": "http", "method": "GET", "path": path}, nothing, nothing)  # type: ignore[arg-type]
    (found,) = given
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("path", sorted(ADMIN))
async def test_everybodys_numbers_are_not_where_clients_are(path: str) -> None:
    assert await routed(AdminRoutes, path) == path
    assert await routed(ClientRoutes, path) == f"{path}-is-on-router.admin_port"


@pytest.mark.parametrize("path", INFERENCE)
async def test_clients_routes_are_not_where_operators_are(path: str) -> None:
    assert await routed(ClientRoutes, path) == path
    assert await routed(AdminRoutes, path) == f"{path}-is-on-router.http_port"


@pytest.mark.parametrize("path", BOTH)
async def test_probes_and_a_tenants_own_requests_are_at_both(path: str) -> None:
    assert [await routed(door, path) for door in (ClientRoutes, AdminRoutes)] == [path, path]


@pytest.mark.parametrize("path", [*sorted(ADMIN), *BOTH, *INFERENCE])
async def test_a_path_with_a_line_break_is_nowhere(path: str) -> None:
    """A route's pattern ends in `$`, which also matches before a break at the end."""
    for door in (ClientRoutes, AdminRoutes):
        assert "-is-on-" in await routed(door, path + "\n")
