"""Which links need our engine to poll for them (measured: link set-up always does, TCP always, CMA now and then)."""

from collections.abc import Iterable


class Readers:
    """The decode workers that may be reading from here."""

    def __init__(self) -> None:
        self._warming: set[str] = set()  # their agent is not connected yet
        self._polling: dict[str, bool] = {}  # connected: whether their reads need our engine to poll
        self._serving = False

    def opened(self, link: str) -> None:
        """A link is up; its reader will now connect."""
        self._warming.add(link)

    def warmed(self, link: str, *, needs_polling: bool) -> None:
        """The reader is connected and has told what its reads need."""
        self._warming.discard(link)
        self._polling[link] = needs_polling

    def closed(self, link: str) -> None:
        self._warming.discard(link)
        self._polling.pop(link, None)

    def change(self, links_with_jobs: Iterable[str]) -> bool | None:
        """Whether the engine should poll from now on; None when that is as before."""
        serving = bool(self._warming) or any(self._polling.get(link, False) for link in links_with_jobs)
        if serving == self._serving:
            return None
        self._serving = serving
        return serving
