"""Names that only we make. A client's own id is echoed, never used as a key (FAULTS C37)."""

import secrets


def new_request_id() -> str:
    """128 random bits as 32 hex digits: unguessable, unique over all routers."""
    return secrets.token_hex(16)


def new_epoch() -> int:
    """A random 64-bit number (never 0) drawn by a process at start. Compared for equality only."""
    return secrets.randbits(64) | 1


def attempt_id(request_id: str, attempt: int) -> str:
    """The name of one try to serve a request. Attempts of one request are numbered from 1."""
    return f"{request_id}.{attempt}"


def agent_name(worker: str, epoch: int) -> str:
    """The name of a worker's transfer agent: a restarted worker is a different peer."""
    return f"{worker}-{epoch:016x}"


def worker_of(agent: str) -> str:
    """The worker of a transfer agent."""
    return agent.rpartition("-")[0]
