"""What the log says of requests: attempts that ended before them, hand-offs that came to nothing, bad endings.

Nothing of a healthy request, and no word that a worker, a client or a library chose: a reason may quote a prompt.
`headrace explain` has the reasons. The rate is bounded where lines are written (cluster/logs.py).
"""

import logging

from cluster.core.ids import attempt_id
from cluster.logs import ATTEMPT, REQUEST
from router.records import RequestRecord

_log = logging.getLogger(__name__)
_FAILOVER = {"lost": logging.WARNING, "failed": logging.WARNING, "unknown to its worker": logging.WARNING}
_IN_ORDER = {"preempted": logging.INFO, "handed over": logging.INFO, "no prefill": logging.INFO}
_LEVELS = _FAILOVER | _IN_ORDER  # others, such as a refusal for want of room, are everyday
_BAD = ("failed", "unavailable", "deadline")


def attempt_over(record: RequestRecord, outcome: str) -> None:
    """Its newest attempt ended, and the request did not. `outcome`: what it is called, a colon, why."""
    what = outcome.partition(":")[0]
    level = _LEVELS.get(what, logging.DEBUG)
    if _log.isEnabledFor(level):
        number = len(record.attempts)
        text = "request %s: attempt %d on %s: %s"
        _log.log(level, text, record.public_id, number, record.attempts[-1].decode, what, extra=_about(record))


def fell_back(record: RequestRecord) -> None:
    """No prefill worker got through with it: its decode worker computes the prompt."""
    last = record.attempts[-1]
    asked = ", ".join(last.prefill)
    text = "request %s: no hand-off from %s, %s computes its prompt"
    _log.warning(text, record.public_id, asked, last.decode, extra=_about(record))


def request_over(record: RequestRecord, outcome: str) -> None:
    """It has ended, and not well."""
    level = logging.WARNING if outcome in _BAD else logging.DEBUG
    if _log.isEnabledFor(level):
        seconds = (record.ended_ms or 0.0) / 1000
        text = "request %s ended: %s, after %.1f s, %d attempts and %d tokens"
        told = (record.public_id, outcome, seconds, len(record.attempts), record.written)
        _log.log(level, text, *told, extra=_about(record))


def turned_away(public_id: str) -> None:
    """There was no place for it in the line."""
    _log.debug("request %s ended: overloaded, before it had a place", public_id, extra={REQUEST: public_id})


def _about(record: RequestRecord) -> dict[str, str]:
    about = {REQUEST: record.public_id}
    return about | {ATTEMPT: attempt_id(record.request_id, len(record.attempts))} if record.attempts else about
