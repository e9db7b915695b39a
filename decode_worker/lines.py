"""What the log says of attempts: hand-offs that came to nothing, pre-emptions, failures. Nothing of healthy ones.

No word that a peer, an engine or a library chose: a reason may quote a prompt, and its router has it.
The rate is bounded where lines are written (cluster/logs.py).
"""

import logging

from cluster.core.handoff_ends import Left, LocalReason
from cluster.logs import ATTEMPT
from cluster.stubs.common_pb2 import Blame
from decode_worker.attempts import Attempt

_log = logging.getLogger(__name__)
_EVERYDAY: tuple[LocalReason, ...] = ("short prompt", "no prefill worker")
_NOT_OURS = (Blame.BLAME_REQUEST, Blame.BLAME_DEADLINE)


def left(attempt: Attempt, worker: str, cause: Left) -> None:
    """Its hand-off goes on without this prefill worker."""
    level = logging.INFO if cause in ("refused", "unusable") else logging.WARNING
    _log.log(level, "attempt %s: hand-off with %s left: %s", attempt.id, worker, cause, extra={ATTEMPT: attempt.id})


def local(attempt: Attempt, why: LocalReason) -> None:
    """Its prompt, or the rest of it, is computed here."""
    if why not in _EVERYDAY:
        text = "attempt %s: what is missing of its prompt is computed here: %s"
        _log.warning(text, attempt.id, why, extra={ATTEMPT: attempt.id})


def preempted(attempt: Attempt) -> None:
    """Its blocks are needed for what came before it."""
    tokens = sum(len(sample.emitted) for sample in attempt.samples)
    _log.info("attempt %s: pre-empted after %d tokens", attempt.id, tokens, extra={ATTEMPT: attempt.id})


def failed(attempt: Attempt, blame: "Blame.ValueType") -> None:
    """This worker cannot go on with it."""
    level = logging.DEBUG if blame in _NOT_OURS else logging.WARNING
    text = "attempt %s: failed here, to be blamed: %s"
    blamed = Blame.Name(blame).removeprefix("BLAME_").lower()
    _log.log(level, text, attempt.id, blamed, extra={ATTEMPT: attempt.id})
