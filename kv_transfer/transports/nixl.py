"""The NIXL transport: one-sided reads between processes over RDMA, CMA (shared memory) or TCP.

The one file that imports nixl. Every call it makes, and why, is explained in docs/experiments/README.md.

1. Turn options into UCX's variables, then make the agent, without a progress thread (it would burn a core).
2. `register`: the pool, readable by peers; then staging and a scratch buffer, which peers never learn of.
3. `add_peer`: load the peer, then read its pool's start into the scratch buffer: once small, which sets the link up,
   then some times larger. Whether those end inside `transfer` tells if the link needs the holder to poll; the quickest
   gives GB/s.
4. `read`: check ranges, post, and look at the state in every `poll` until it has ended.
5. `drop_peer`: refuse new reads. NIXL forgets the peer only after its last read has ended: afterwards it could not
   tell the state of a read any more, while the bytes may still land (measured).

Known limit: over TCP, UCX 1.23 can abort the holder's process when a reader dies in mid-read; each time when the holder
had not polled meanwhile, now and then when it had (measured). Not seen over CMA, where the holder takes no part.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cluster.core.clock import Clock
from cluster.core.errors import TransferError
from engine.messages import PeerAdded, PeerFailed, ReadDone, ReadFailed
from engine.wire import Bytes, DeviceBytes, address_of
from kv_transfer.transports.metadata import Metadata
from kv_transfer.transports.ranges import check_read

Event = ReadDone | ReadFailed | PeerAdded | PeerFailed

WARM_TIMEOUT_S = 5.0
_FIRST_BYTES = 4096  # sets the link up
_PROBE_BYTES = 1 << 20
_PROBES = 5  # about one TCP read in a hundred ends inside `transfer` by luck; all five must

# NIXL asks UCX for peer error handling, which shared memory lacks, so `shm` cannot do without tcp (measured).
# Where there are GPUs NIXL takes no list without cuda_copy; elsewhere UCX passes over it.
_TRANSPORTS = {
    "any": None,
    "tcp": "tcp,self,cuda_copy",
    "shm": "cma,tcp,self,cuda_copy",
    "rdma": "ib,self,cuda_copy",
    "cuda_ipc": "cuda_ipc,cuda_copy,tcp,self",  # tcp: for what links say to each other before they carry KV
}

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _WarmUp:
    """A link being set up and measured."""

    peer: str
    deadline: float
    sizes: list[int]  # reads still to post, bytes
    probing: bool = False  # the read that sets up the link has ended
    needs_polling: bool = False
    gb_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Pool:
    """A peer's readable memory."""

    start: int
    size: int
    device: int | None


@dataclass(eq=False, slots=True)
class _Posted:
    """A read that NIXL works on. Its target memory stays taken until it has ended."""

    peer: str
    owner: int | _WarmUp  # read id, or the warm-up it belongs to
    handle: Any
    size: int
    started: float
    failure: str | None = None


class NixlTransport:
    """A `Transport` (engine/wire.py) over a NIXL agent with the UCX backend."""

    name = "nixl"

    def __init__(self, agent: str, options: dict[str, str], clock: Clock) -> None:
        """Make the agent `agent`. About 2 s.

        `options`: `require` any | rdma | cuda_ipc | shm | tcp, `devices` comma-separated UCX device names, `port_range`
        "a-b" for UCX's TCP listener. Raises TransferError when the machine lacks what is required, or NIXL fails.
        """
        self._agent = agent
        self._require = options.get("require", "any")
        self._clock = clock
        _check(self._require)
        _set_variables(self._require, options.get("devices", ""), options.get("port_range", ""))
        self._nixl, self._errors = _make_agent(agent)
        self._staging: Bytes = np.empty((0, 0), np.uint8)
        self._scratch: Bytes = np.zeros((1, _PROBE_BYTES), np.uint8)
        self._peers: dict[str, _Pool] = {}
        self._warming: dict[str, _WarmUp] = {}
        self._loaded: set[str] = set()  # peers that NIXL knows: `_peers` and those with reads still in progress
        self._posted: list[_Posted] = []
        self._events: list[Event] = []
        self._serving = False

    def register(self, pool: Bytes, staging: Bytes) -> bytes:
        """See Transport. Raises TransferError."""
        if self._require == "cuda_ipc" and not isinstance(pool, DeviceBytes):
            raise TransferError("transport cuda_ipc is required, but the pool is in host memory: see engine.device")
        self._staging = staging
        if isinstance(staging, DeviceBytes):  # warm the path that reads will take
            self._scratch = DeviceBytes(staging.address + staging.nbytes, (1, staging.spare), staging.device)
        try:
            self._register(pool)
            metadata = Metadata.make(self._agent, pool.nbytes, self._nixl.get_agent_metadata(), _device(pool))
            # After the metadata was taken: what is registered now is ours alone, peers can read the pool only.
            self._register(staging)
            self._register(self._scratch)
        except self._errors as error:
            raise TransferError(f"cannot register memory: {_text(error)}") from error
        return metadata.pack()

    def add_peer(self, peer: str, metadata: bytes, pool_address: int) -> None:
        """See Transport. A peer that was there already is warmed and measured again."""
        self.drop_peer(peer)
        try:
            pool = self._load(peer, metadata, pool_address)
        except TransferError as error:
            self._events.append(PeerFailed(peer, str(error)))
            return
        largest = min(pool.size, self._scratch.nbytes)
        sizes = [min(_FIRST_BYTES, largest)] + _PROBES * [largest]
        warm = _WarmUp(peer, self._clock.now() + WARM_TIMEOUT_S, sizes)
        self._peers[peer] = pool
        self._warming[peer] = warm
        self._warm(warm)

    def drop_peer(self, peer: str) -> None:
        """See Transport."""
        self._peers.pop(peer, None)
        self._warming.pop(peer, None)
        self._forget()

    def read(self, read_id: int, peer: str, ranges: list[tuple[int, int]], slot: int) -> None:
        """See Transport."""
        try:
            pool = self._peers.get(peer)
            if pool is None or peer in self._warming:
                raise TransferError(f"peer {peer} is unknown, or its link is not warm")
            check_read(ranges, pool.start, pool.size, self._staging, slot)
            started = self._clock.now()
            posted = self._post(peer, read_id, address_of(self._staging, slot), ranges)
            if posted is None:
                self._events.append(ReadDone(read_id, self._clock.now() - started))
        except TransferError as error:
            self._events.append(ReadFailed(read_id, str(error)))

    def serve(self, on: bool) -> None:
        """See Transport."""
        self._serving = on

    def poll(self) -> list[Event]:
        """See Transport."""
        for posted in list(self._posted):
            if self._has_ended(posted):
                self._posted.remove(posted)
                self._ended(posted)
        now = self._clock.now()
        for warm in [warm for warm in self._warming.values() if now > warm.deadline]:
            self._give_up(warm.peer, f"the link was not warm after {WARM_TIMEOUT_S:g} s: does the peer answer?")
        if self._serving:
            self._nixl.get_new_notifs()  # the only call by which an idle holder lets UCX answer its readers
        self._forget()
        events, self._events = self._events, []
        return events

    @property
    def busy(self) -> bool:
        """See Transport. A warm-up that was given up does not count: nobody waits for it to end."""
        return (
            self._serving or bool(self._warming or self._events) or any(isinstance(p.owner, int) for p in self._posted)
        )

    def close(self) -> None:
        """See Transport. Destroys the agent, and with it every connection: no read can land afterwards."""
        for posted in self._posted:
            self._release(posted)
        self._posted.clear()
        self._peers.clear()
        self._warming.clear()
        self._forget()
        self._nixl = None

    def _register(self, memory: Bytes) -> None:
        device = _device(memory)
        self._nixl.register_memory([(address_of(memory), memory.nbytes, device or 0, "")], _kind(device))

    def _load(self, peer: str, raw: bytes, pool_address: int) -> _Pool:
        """Make NIXL know the peer. Returns its pool; raises TransferError."""
        metadata = Metadata.parse(raw, peer)
        try:
            self._nixl.add_remote_agent(metadata.nixl)
        except self._errors as error:
            raise TransferError(f"cannot add the agent: {_text(error)}") from error
        self._loaded.add(peer)
        return _Pool(pool_address, metadata.pool_bytes, metadata.device)

    def _warm(self, warm: _WarmUp) -> None:
        """Post the reads of a warm-up, until one does not end at once or all are done."""
        try:
            while warm.sizes:
                size = warm.sizes.pop(0)
                started = self._clock.now()
                target, pool = address_of(self._scratch), self._peers[warm.peer]
                if self._post(warm.peer, warm, target, [(pool.start, size)]) is not None:
                    warm.needs_polling |= warm.probing
                    return
                self._measure(warm, size, started)
        except TransferError as error:
            self._give_up(warm.peer, str(error))
            return
        if self._require == "shm" and warm.needs_polling:
            self._give_up(warm.peer, f"transport shm is required, the link does not use it ({warm.gb_per_s:.2f} GB/s)")
            return
        del self._warming[warm.peer]
        self._events.append(PeerAdded(warm.peer, warm.needs_polling, warm.gb_per_s))

    def _measure(self, warm: _WarmUp, size: int, started: float) -> None:
        if warm.probing:
            seconds = max(self._clock.now() - started, 1e-9)  # a test's clock may stand still
            warm.gb_per_s = max(warm.gb_per_s, size / seconds / 1e9)
        warm.probing = True

    def _give_up(self, peer: str, reason: str) -> None:
        self.drop_peer(peer)
        self._events.append(PeerFailed(peer, reason))

    def _post(self, peer: str, owner: int | _WarmUp, target: int, ranges: list[tuple[int, int]]) -> _Posted | None:
        """Start a read of (address, bytes) ranges. None when it is done already; raises TransferError if it failed."""
        device, own = self._peers[peer].device, _device(self._staging)
        there = [(address, size, device or 0) for address, size in ranges]
        here = [(place, size, own or 0) for place, (_, size) in zip(_places(target, ranges), ranges, strict=True)]
        try:
            here_descs = self._nixl.get_xfer_descs(here, _kind(own))
            there_descs = self._nixl.get_xfer_descs(there, _kind(device))
            handle = self._nixl.initialize_xfer("READ", here_descs, there_descs, peer)
        except self._errors as error:
            raise TransferError(f"cannot post the read: {_text(error)}") from error
        posted = _Posted(peer, owner, handle, sum(size for _, size in ranges), self._clock.now())
        try:
            state = self._nixl.transfer(handle)
        except self._errors as error:
            posted.failure = _text(error)
        else:
            posted.failure = "NIXL reports an error" if state == "ERR" else None
            if state == "PROC":
                self._posted.append(posted)
                return posted
        if not self._release(posted):
            self._posted.append(posted)
            return posted
        if posted.failure is not None:
            raise TransferError(posted.failure)
        return None

    def _has_ended(self, posted: _Posted) -> bool:
        """Whether NIXL is done with a read and has released it. `failure` says how it ended."""
        if posted.failure is None:
            try:
                state = self._nixl.check_xfer_state(posted.handle)  # also the reader's own progress
            except self._errors as error:
                state, posted.failure = "ERR", _text(error)
            if state == "PROC":
                return False
            if state == "ERR":
                posted.failure = posted.failure or "NIXL reports an error"
        return self._release(posted)

    def _release(self, posted: _Posted) -> bool:
        """Give the handle back. False when NIXL still works on it: then the read has not ended."""
        try:
            self._nixl.release_xfer_handle(posted.handle)
        except self._errors as error:
            _log.warning("a read from %s is not released: %s", posted.peer, _text(error))
            return False
        posted.handle = None  # NIXL would read freed memory if it were asked about it again
        return True

    def _ended(self, posted: _Posted) -> None:
        warm = posted.owner
        if not isinstance(warm, _WarmUp):
            seconds = self._clock.now() - posted.started
            failed = posted.failure
            self._events.append(ReadDone(warm, seconds) if failed is None else ReadFailed(warm, failed))
        elif self._warming.get(posted.peer) is warm:  # else it was given up, and this is its late end
            if posted.failure is not None:
                self._give_up(posted.peer, posted.failure)
            else:
                self._measure(warm, posted.size, posted.started)
                self._warm(warm)

    def _forget(self) -> None:
        """Let NIXL forget the peers that were dropped and have no read in progress any more."""
        for peer in self._loaded - self._peers.keys() - {posted.peer for posted in self._posted}:
            self._nixl.remove_remote_agent(peer)
            self._loaded.remove(peer)


def _places(target: int, ranges: list[tuple[int, int]]) -> Iterator[int]:
    """Where each range lands: back to back from `target`."""
    for _, size in ranges:
        yield target
        target += size


def _device(memory: Bytes) -> int | None:
    return memory.device if isinstance(memory, DeviceBytes) else None


def _kind(device: int | None) -> str:
    """NIXL's word for host memory, or for that of a GPU."""
    return "DRAM" if device is None else "VRAM"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _check(require: str) -> None:
    """Raise TransferError when this machine cannot do what is required, naming what it has."""
    if require == "rdma":
        if not _listing("/sys/class/infiniband"):
            network = ", ".join(_listing("/sys/class/net")) or "none"
            raise TransferError(f"transport rdma is required, but there is no RDMA device; network devices: {network}")
    elif require == "cuda_ipc":
        if not _listing("/proc/driver/nvidia/gpus"):
            raise TransferError("transport cuda_ipc is required, but there is no NVIDIA GPU")
    elif require not in _TRANSPORTS:
        raise TransferError(f"transport require: {require!r} is not one of {sorted(_TRANSPORTS)}")


def _listing(folder: str) -> list[str]:
    path = Path(folder)
    return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []


def _set_variables(require: str, devices: str, port_range: str) -> None:
    """UCX reads these when the backend is made. The configuration alone decides: without an option, no variable.

    Without `devices` UCX listens on every interface; links within the host need loopback only.
    """
    variables = {
        "UCX_TLS": _TRANSPORTS[require],
        "UCX_NET_DEVICES": devices or ("lo" if require == "shm" else None),
        "UCX_TCP_PORT_RANGE": port_range or None,
        # UCX asks an idle peer every 20 s whether it lives. Until the peer polls, no read from it ends, over shared
        # memory too (measured). A dead process is noticed without: its sockets close, reading its memory fails.
        "UCX_KEEPALIVE_INTERVAL": "inf",
        "NIXL_LOG_LEVEL": "WARN",
        "UCX_LOG_LEVEL": "error",  # its warnings at tear-down tell nothing new
    }
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _make_agent(name: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """The agent and the exceptions NIXL raises, which have no common base. Raises TransferError."""
    try:
        from nixl import _bindings  # after the variables are set: it reads its log level when it is imported
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise TransferError(f"NIXL cannot be loaded: {error}") from error
    logger = logging.getLogger("nixl")
    logger.handlers.clear()  # they write to stdout, which may be a protocol
    logger.propagate = True
    errors = tuple(value for key, value in vars(_bindings).items() if key.startswith("nixl") and key.endswith("Error"))
    try:
        agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    except errors as error:
        raise TransferError(f"cannot make the agent {name}: {_text(error)}") from error
    if "UCX" not in agent.backends:
        raise TransferError("NIXL came without its UCX backend")
    return agent, errors
