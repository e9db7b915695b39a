"""A program that dies by itself is a broken invariant; one that was killed is not."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import grpc
import pytest

from chaos.ask import Manner
from chaos.disturb import Disturbance, Disturbances
from chaos.exchange import End, _grpc_end
from chaos.run import _crashed


@dataclass
class Cluster:
    """As much of a LocalCluster as is looked at."""

    restarts: dict[str, int]
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = list(self.restarts)

    def status(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(restarts=self.restarts[name])


@pytest.mark.parametrize(
    ("deaths", "kinds", "crashed"),
    [
        (0, [], False),
        (1, [], True),
        (1, ["kill server"], False),
        (2, ["kill engine", "stop both"], True),
        (1, ["restart"], True),
        (2, ["kill engine", "stall engine"], False),
    ],
)
def test_deaths_that_nobody_caused_are_told(deaths: int, kinds: list[str], crashed: bool) -> None:
    done = Disturbances([Disturbance("decode-0", "decode", kind, 0.0) for kind in kinds])
    done.done.append(Disturbance("decode-1", "decode", "kill server", 0.0))
    found = _crashed(Cluster({"decode-0": deaths, "decode-1": 1}), done)  # type: ignore[arg-type]
    assert [words.startswith("decode-0 died") for words in found] == [True] * crashed


@dataclass
class Failure:
    """As much of an AioRpcError as is looked at."""

    status: grpc.StatusCode
    words: str

    def code(self) -> grpc.StatusCode:
        return self.status

    def details(self) -> str:
        return self.words


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_a_refusal_after_tokens_is_no_refusal(status: grpc.StatusCode) -> None:
    failure = Failure(status, "no decode worker is ready")
    assert _grpc_end(failure, Manner("grpc", stream=True), begun=False) is End.BUSY  # type: ignore[arg-type]
    assert _grpc_end(failure, Manner("grpc", stream=True), begun=True) in (End.BROKEN, End.FAILED)  # type: ignore[arg-type]
