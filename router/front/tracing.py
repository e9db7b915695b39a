"""Traces of calls: what the front door asks of a tracer, whichever it is. Off, there is none, and nothing is loaded.

The one file that knows OpenTelemetry is otel.py.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Protocol

from cluster.core.clock import Clock
from cluster.core.config import TracingSettings
from cluster.core.errors import ConfigError
from router.records import Recorder


def carrier_of(headers: Iterable[tuple[str | bytes, str | bytes]]) -> dict[str, str]:
    """Headers or metadata by name. What came in several is one, with commas between (RFC 9110, 5.3): so two parents
    are none, as W3C Trace Context has it (3.2.1), and a state in parts is whole (3.3.1.1). Of two parents over gRPC its
    library hands on the last alone."""
    carrier: dict[str, str] = {}
    for name, value in headers:
        key, text = _text(name), _text(value)
        carrier[key] = f"{carrier[key]},{text}" if key in carrier else text
    return carrier


def _text(header: str | bytes) -> str:
    return header if isinstance(header, str) else header.decode("latin-1")


class CallSpan(Protocol):
    """One call's span, from its first byte on."""

    def context(self) -> dict[str, str]:
        """W3C trace context of this span, for the answer."""

    def named(self, public_id: str) -> None:
        """What the answer calls the request: its `x-request-id`."""

    def admitted(self, request_id: str) -> None:
        """The call became this request, or one more, which runs: its record is looked up now."""

    def end(self, outcome: str, first_token: float | None, attributes: Mapping[str, str | int | float]) -> None:
        """The call is over. `first_token`: when it came, on the router's clock."""


class Tracing(Protocol):
    """Makes spans and sends them somewhere. Never raises, never waits."""

    def start(self, api: str, carrier: Mapping[str, str]) -> CallSpan:
        """A call has come. `carrier`: its headers or metadata, by lower-case name."""

    def close(self) -> None:
        """Send what is left. Blocks for a few seconds at most."""


class TracerMaker(Protocol):
    """What otel.py has for `open_tracing`."""

    def __call__(self, settings: TracingSettings, recorder: Recorder, clock: Clock, program: str) -> Tracing: ...


def open_tracing(settings: TracingSettings, recorder: Recorder, clock: Clock, program: str) -> Tracing | None:
    """None where it is off. `recorder` knows requests that run. Raises ConfigError."""
    if settings.otlp_endpoint is None:
        return None
    try:
        make: TracerMaker = import_module("router.front.otel").make_tracing
    except ImportError as error:
        raise ConfigError(
            f"tracing.otlp_endpoint: needs OpenTelemetry ({error}): pip install 'headrace[tracing]'"
        ) from error
    return make(settings, recorder, clock, program)
