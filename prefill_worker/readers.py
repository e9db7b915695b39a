"""Which links need our engine to poll for them (measured: link set-up always does, TCP always, CMA now and then)."""

from collections.abc import Iterable

HELP_S = 2.0  # how long one request for help is good for


class Readers:
    """The decode workers that may be reading from here."""

    def __init__(self) -> None:
        self._warming: set[str] = set()  # their agent is not connected yet
        self._polling: dict[str, bool] = {}  # connected: whether their reads need our engine to poll
        self._until: dict[str, float] = {}  # asked to poll: reads that were given up have to end, jobs or no jobs
        self._serving = False

    def opened(self, link: str) -> None:
        """A link is up; its reader will now connect."""
        self._warming.add(link)

    def warmed(self, link: str, now: float, *, needs_polling: bool) -> None:
        """The reader is connected and has told what its reads need; or it asks for help with reads that hang."""
        self._warming.discard(link)
        self._polling[link] = needs_polling
        if needs_polling:
            self._until[link] = now + HELP_S

    def closed(self, link: str) -> None:
        self._warming.discard(link)
        self._polling.pop(link, None)
        self._until.pop(link, None)

    def change(self, links_with_jobs: Iterable[str], now: float) -> bool | None:
        """Whether the engine should poll from now on; None when that is as before."""
        serving = bool(self._warming) or any(self._polling.get(link, False) for link in links_with_jobs)
        serving = serving or any(now < until for until in self._until.values())
        if serving == self._serving:
            return None
        self._serving = serving
        return serving
