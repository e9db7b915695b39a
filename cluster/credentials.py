"""How members of a cluster prove to each other that they know its secret, which itself never crosses the wire.

1. call    the client's metadata holds a random number, the time, and their HMAC under the secret for the port it dials
2. check   the server computes it again, in constant time; another port, a time far off, a number used before: refused
3. answer  the server's first metadata is the HMAC of that number; the client says nothing before it has seen it

So who listens where a worker used to be learns nothing and is believed nothing, and what was overheard cannot be said
again, there or elsewhere. It neither hides what follows nor keeps somebody in the middle from changing it: between
machines that takes TLS (cluster/tls.py), which then comes on top (docs/security.md).
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from cluster.core.clock import Clock, SystemClock
from cluster.tls import NamedTls

WINDOW_S = 300.0
"""How far two machines' clocks may be apart."""

_NUMBER_BYTES = 16
_MOST_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Proof:
    """Of one call. `given` goes with it; `expected` is what only a member can answer."""

    given: str
    expected: str

    def is_answered_by(self, answer: str | None) -> bool:
        return answer is not None and same_secret(answer, self.expected)


class Credentials:
    """What one program of a cluster has: to be let in by the others, and to know them. For one event loop.

    `tls`: the certificates of internal streams, None without.
    """

    def __init__(self, secret: str, tls: NamedTls | None = None, clock: Clock | None = None) -> None:
        self._key = secret.encode()
        self._clock = clock or SystemClock()
        self._used: dict[str, float] = {}  # when, in order
        self.tls = tls

    def proof(self, address: str) -> Proof:
        """For one call to `address`, host:port."""
        number, now = secrets.token_hex(_NUMBER_BYTES), f"{self._clock.wall():.0f}"
        mac = self._mac("call", address.rpartition(":")[2], number, now)
        return Proof(f"{number}.{now}.{mac}", self._mac("answer", number))

    def check(self, given: str | None, port: int) -> str | None:
        """What to answer a call that came to our `port` with this proof; None: it is refused. Good once."""
        if given is None or not given.isascii() or len(given) > _MOST_CHARACTERS or given.count(".") != 2:
            return None
        number, told, mac = given.split(".")
        if not same_secret(mac, self._mac("call", str(port), number, told)) or not told.isdecimal():
            return None
        now = self._clock.wall()
        if abs(now - int(told)) > WINDOW_S or not self._first(number, now):
            return None
        return self._mac("answer", number)

    def _first(self, number: str, now: float) -> bool:
        """Only members' numbers come here, so nobody else can fill the memory of them."""
        while self._used and self._used[oldest := next(iter(self._used))] < now - 2 * WINDOW_S:
            del self._used[oldest]
        if number in self._used:
            return False
        self._used[number] = now
        return True

    def _mac(self, *parts: str) -> str:
        return hmac.digest(self._key, "\0".join(("headrace", *parts)).encode(), hashlib.sha256).hex()


def same_secret(given: str, expected: str) -> bool:
    """Compare in constant time, so that an answer's delay tells nothing about the secret."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())
