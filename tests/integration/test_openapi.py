"""The OpenAPI document is true: schemathesis makes requests of it and holds the answers against it.

Nothing it thinks of is a 5xx, an answer that the document does not know, a success for what it forbids, or a refusal
of what it allows - but for what several fields say together, which a document of types and ranges cannot tell.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS, CheckContext, CheckFunction

from router.front.http_app import make_app
from tests.fakes.dispatcher import DEFAULT_LIMITS, FakeDispatcher, say
from tests.integration.front_door_server import make_front, passing_text

DISPATCHER = FakeDispatcher(say("é🌶 ok"), replace(DEFAULT_LIMITS, max_context=100_000, pool_tokens=200_000))
SCHEMA = schemathesis.openapi.from_asgi(
    "/openapi.json", make_app(make_front(DISPATCHER, text=passing_text()), DISPATCHER)
)
# Replaced by `what_is_allowed_is_served`.
COARSE = cast("list[CheckFunction]", [CHECKS.get_one("positive_data_acceptance")])
TOGETHER = re.compile(
    "contradict each other|is only allowed when|best_of other than n|are needed|is needed"
    "|can be 0 only|is not told in a stream"
    "|tool_choice (demands|names|other than)|only an assistant|content must not be null|must not hold|can be at most"
    "|contradicts|only one of"
    "|input should be a valid integer|token ids must be integers"  # to JSON Schema 60.0 is one; to OpenAI it is not
)
"""Refusals for fields that each are as the document says."""
LANGUAGES = ("response_format", "guided_", "structured_outputs", "tools", "logit_bias")
"""Fields whose values have rules of their own: schemas, expressions, grammars, names that are token ids."""
QUICK = settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", autouse=True)
def some_bodies_are_good() -> Iterator[None]:
    yield
    assert DISPATCHER.requests


def what_is_allowed_is_served(_: CheckContext, response: Any, case: schemathesis.Case[Any]) -> None:
    """Schemathesis has a check of this name's meaning, which knows statuses alone."""
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code != 400:
        return
    error = response.json()["error"]
    if error["code"] != "context_length_exceeded" and not str(error["param"]).startswith(LANGUAGES):
        assert TOGETHER.search(error["message"]), error


OURS = cast("list[CheckFunction]", [what_is_allowed_is_served])


@SCHEMA.parametrize()
@QUICK
def test_whatever_the_document_allows_or_forbids(case: schemathesis.Case[Any]) -> None:
    case.call_and_validate(excluded_checks=COARSE, additional_checks=OURS)


@pytest.mark.verify
@SCHEMA.parametrize()
@settings(QUICK, max_examples=500, derandomize=False)
def test_much_of_what_the_document_allows_or_forbids(case: schemathesis.Case[Any]) -> None:
    case.call_and_validate(excluded_checks=COARSE, additional_checks=OURS)
