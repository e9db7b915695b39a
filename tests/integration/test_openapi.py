"""The OpenAPI document is true: schemathesis makes requests of it and holds the answers against it.

Nothing it thinks of is a 5xx, an answer that the document does not know, or a success for what it forbids.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS, CheckFunction

from router.front.http_app import make_app
from tests.fakes.dispatcher import DEFAULT_LIMITS, FakeDispatcher, say
from tests.integration.front_door_server import make_front

DISPATCHER = FakeDispatcher(say("é🌶 ok"), replace(DEFAULT_LIMITS, max_context=100_000, pool_tokens=200_000))
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", make_app(make_front(DISPATCHER), DISPATCHER))
# Which bodies contradict themselves (top_logprobs without logprobs) or are too long the document cannot say.
UNSAID = cast("list[CheckFunction]", [CHECKS.get_one("positive_data_acceptance")])
QUICK = settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", autouse=True)
def some_bodies_are_good() -> Iterator[None]:
    yield
    assert DISPATCHER.requests


@SCHEMA.parametrize()
@QUICK
def test_whatever_the_document_allows_or_forbids(case: schemathesis.Case[Any]) -> None:
    case.call_and_validate(excluded_checks=UNSAID)


@pytest.mark.verify
@SCHEMA.parametrize()
@settings(QUICK, max_examples=500, derandomize=False)
def test_much_of_what_the_document_allows_or_forbids(case: schemathesis.Case[Any]) -> None:
    case.call_and_validate(excluded_checks=UNSAID)
