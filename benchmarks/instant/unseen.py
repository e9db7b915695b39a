"""`python -m benchmarks.instant.unseen`: a router that counts nothing of what it serves.

What being seen costs is measured beside it: times, tokens and outcomes of calls are not observed. What the dispatcher
needs to know for itself it knows as ever.
"""

import sys
from functools import partial
from types import TracebackType
from typing import Self

from cluster.program import run
from router.front.metrics import Call, FrontMetrics
from router.front.usage import Usage
from router.requests import Trace
from router.server import serve


class UnseenCall(Call):
    """Knows what limits of tenants are charged by, and when it began."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def follow(self, trace: Trace) -> None:
        pass

    def tokens(self, index: int) -> None:
        pass

    def ended(self, samples: object) -> None:
        pass

    def used(self, usage: Usage, dropped: int, trace: Trace) -> None:
        self.written += usage.completion
        self.read += usage.prompt


class UnseenMetrics(FrontMetrics):
    """Metrics that stay 0."""

    def call(self, api: str) -> Call:
        return UnseenCall(self, api, self._times[api])


if __name__ == "__main__":
    sys.exit(run("router", partial(serve, make_metrics=UnseenMetrics)))
