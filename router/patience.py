"""How long a waiting request waits for a worker that could take it (DESIGN §6). Pure.

1. *Nobody is there.* While no decode worker is ready, patience runs from the later of two moments: since then, and
   since the request came to the line, or back to it. A stream that ran on through a long drain has all of its own.
2. *Nobody could ever take it.* Those that are ready are too small, or have other weights: it runs since that was seen.
3. *How long.* A request of which nobody has anything ends soon: its client asks again. One that has begun cannot be
   asked for again, so it waits for a worker that is started again; only where other weights are all that is left does
   it end as soon.
4. *Frozen.* No patience runs out while this process itself slept.
"""

from router.books import Books
from router.follow import Follow


class Patience:
    """Of all requests that wait. `unavailable_s`: with a new one; `comeback_s`: with one that has begun."""

    def __init__(self, books: Books, unavailable_s: float, comeback_s: float) -> None:
        self._books = books
        self._unavailable_s = unavailable_s
        self._comeback_s = comeback_s
        self._nobody_since: float | None = None

    def with_nobody(self, now: float) -> list[Follow]:
        """Those that have waited for long enough with no decode worker ready. To be asked at every tick."""
        if self._books.workers.ready("decode", now):
            self._nobody_since = None
            return []
        since = self._nobody_since = now if self._nobody_since is None else self._nobody_since
        waiting = [self._books.requests[request_id] for request_id in self._books.queue.ids()]
        return [f for f in waiting if now - max(since, f.tries.waiting_since) >= self._with(f)]

    def hopeless(self, follow: Follow, now: float) -> bool:
        """Note that nobody who is ready could ever take it. Returns whether it has waited so for long enough."""
        tries = follow.tries
        tries.hopeless_since = now if tries.hopeless_since is None else tries.hopeless_since
        patience = self._with(follow) if self._its_weights_are_left(follow) else self._unavailable_s
        return now - tries.hopeless_since >= patience

    def forgive(self, gap_s: float, now: float) -> None:
        """This process slept for `gap_s` until now."""
        if self._nobody_since is not None:
            self._nobody_since = min(now, self._nobody_since + gap_s)
        for follow in self._books.requests.values():
            tries = follow.tries
            tries.waiting_since = min(now, tries.waiting_since + gap_s)
            if tries.hopeless_since is not None:
                tries.hopeless_since = min(now, tries.hopeless_since + gap_s)

    def _with(self, follow: Follow) -> float:
        return self._comeback_s if follow.begun else self._unavailable_s

    def _its_weights_are_left(self, follow: Follow) -> bool:
        """Whether a decode worker, in whatever state, has the weights this request began with."""
        workers = self._books.workers.by_address.values()
        return any(w.role == "decode" and w.facts.shape.fingerprint == follow.tries.fingerprint for w in workers)
