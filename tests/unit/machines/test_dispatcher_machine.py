"""One router's brain among workers and clients that do anything, in any order (I2, I3, I4, I11).

Workers are those of `fakes.py`: honest, until a rule makes them die, hang up, refuse, fall silent or lie. After every
effect the books are audited (`world.py`); after every rule they are compared with what the clients know.
"""

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.core.errors import HeadraceError, Overloaded, RequestFailed
from cluster.stubs import session_pb2 as pb
from cluster.stubs.common_pb2 import Blame
from cluster.stubs.watch_pb2 import WatchEvent
from router.effects import StreamClosed, StreamOpened
from router.requests import Request, SamplingParams
from tests.stateful import long, quick
from tests.unit.router_core.fakes import FakeWorker, Faults, expected
from tests.unit.router_core.world import Client, World

WORKERS = ("p0", "p1", "d0", "d1")
DECODE = ("d0:1", "d1:1")
QUEUE = 6
KINDS = ("no_prefill", "refused", "refused for good", "preempted", "handed over", "failed", "invalid", "could not run",
    "unknown",
         "prefill_on", "handed_off", "gap", "contradiction", "too many", "another sample", "strange end")  # fmt: skip
ENDS_IT = KINDS[:8]
FAULTS = ("refuse", "no_prefill", "preempt", "fail", "repeat", "late")

shapes = st.tuples(
    st.lists(st.integers(0, 50), min_size=1, max_size=20),
    st.integers(1, 12),
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([600.0, 600.0, 3.0]),
)


def word(kind: str, attempt: str, offset: int, max_tokens: int) -> pb.FromDecode:
    """Something that a decode worker may say of an attempt, or that none should."""

    def run(**changes: object) -> pb.FromDecode:
        fields: dict[str, object] = {"attempt": attempt, "offset": offset, "ids": [999_999], **changes}
        return pb.FromDecode(tokens=pb.Tokens(runs=[pb.TokenRun(**fields)]))  # type: ignore[arg-type]

    match kind:
        case "no_prefill":
            return pb.FromDecode(no_prefill=pb.NoPrefill(attempt=attempt, retry_after_s=0.2))
        case "refused" | "refused for good":
            return pb.FromDecode(refused=pb.AttemptRefused(attempt=attempt, permanent=kind != "refused"))
        case "preempted" | "handed over":
            return pb.FromDecode(preempted=pb.Preempted(attempt=attempt, draining=kind != "preempted"))
        case "failed":
            return pb.FromDecode(failed=pb.AttemptFailed(attempt=attempt))
        case "invalid":
            return pb.FromDecode(failed=pb.AttemptFailed(attempt=attempt, blame=Blame.BLAME_REQUEST))
        case "could not run":
            return pb.FromDecode(failed=pb.AttemptFailed(attempt=attempt, blame=Blame.BLAME_UNSETTLED))
        case "unknown":
            return pb.FromDecode(unknown=pb.UnknownAttempt(attempt=attempt))
        case "prefill_on":
            return pb.FromDecode(prefill_on=pb.PrefillOn(attempt=attempt, worker="nobody"))
        case "handed_off":
            return pb.FromDecode(handed_off=pb.HandedOff(attempt=attempt))
        case "gap":
            return run(offset=offset + 1)
        case "contradiction":
            return run(offset=offset - 1)
        case "too many":
            return run(ids=[1] * (max_tokens + 1))
        case "another sample":
            return run(index=77)
        case _:
            return run(end="because")


class Dispatcher(RuleBasedStateMachine):
    """Two prefill workers, two decode workers, clients."""

    @initialize(seed=st.integers(0, 99), wanted=st.lists(shapes, min_size=1, max_size=4), fault=st.sampled_from(FAULTS))
    def begin(self, seed: int, wanted: list[tuple[list[int], int, int, float]], fault: str) -> None:
        rng = random.Random(seed)
        roles = {name: "prefill" if name[0] == "p" else "decode" for name in WORKERS}
        self.workers = [FakeWorker(name, role, rng, blocks=24) for name, role in roles.items()]
        self.world = World(self.workers, seed, queue_limit=QUEUE, max_attempts=4)
        self.world.connect()
        self.overloaded = 0
        self.cancelled = 0
        self.asked = 0
        self.misbehave(0.2, fault)
        for one in wanted:
            self.ask(one)

    # -- clients --------------------------------------------------------------------------------------------------

    @rule(wanted=shapes)
    def ask(self, wanted: tuple[list[int], int, int, float]) -> None:
        prompt, max_tokens, n, deadline_s = wanted
        self.asked += 1
        name = f"r{self.asked}"
        sampling = SamplingParams(seed=self.asked)
        request = Request(name, "x", tuple(prompt), max_tokens, n, sampling, deadline_s=deadline_s)
        try:
            self.world.ask(request)
        except Overloaded:
            self.overloaded += 1
            del self.world.clients[name]
            self.world.apply([])

    @rule(data=st.data(), twice=st.booleans())
    def cancel(self, data: st.DataObject, twice: bool) -> None:
        """In any phase, also after the end, also twice, also one that never was."""
        name = data.draw(st.sampled_from(["nobody", *self.world.clients]))
        client = self.world.clients.get(name)
        if client is not None and not client.over:
            self.world.cancel(name)
            self.cancelled += 1
        for _ in range(1 + twice):
            before = self.books()
            self.world.apply(self.world.core.cancel(name, self.world.now))
            assert self.books() == before

    @rule(data=st.data(), index=st.integers(0, 2))
    def stop(self, data: st.DataObject, index: int) -> None:
        """Any sample in any phase, also twice."""
        name = data.draw(st.sampled_from(["nobody", *self.world.clients]))
        client = self.world.clients.get(name)
        if client is None or client.over:
            assert self.world.core.stop(name, index, self.world.now) == []
        elif index < client.request.n:
            self.world.stop(name, index)
        else:
            before = self.books()
            with pytest.raises(IndexError):
                self.world.core.stop(name, index, self.world.now)
            assert self.books() == before

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(["nobody", *self.world.clients]))
        client = self.world.clients.get(name)
        ends = client is not None and not client.over
        self.world.apply(self.world.core.abort(name, RequestFailed("the shell says so"), self.world.now))
        if client is not None and ends:
            assert [str(outcome) for outcome in client.outcomes] == ["the shell says so"]

    # -- workers --------------------------------------------------------------------------------------------------

    def worker(self, name: str) -> FakeWorker:
        return next(worker for worker in self.workers if worker.name == name)

    @rule(name=st.sampled_from(WORKERS))
    def die(self, name: str) -> None:
        if f"{name}:1" in self.world.workers:
            self.world.die(f"{name}:1")

    @rule(name=st.sampled_from(WORKERS))
    def freeze(self, name: str) -> None:
        """It neither speaks nor closes anything: only its silence tells."""
        self.worker(name).up = False

    @rule(name=st.sampled_from(WORKERS), same=st.booleans())
    def come_back(self, name: str, same: bool) -> None:
        """Thawed, or restarted as a new peer on the same address."""
        worker = self.worker(name)
        if not same:
            worker.restart()
        worker.up = True
        self.world.connect()

    @rule(address=st.sampled_from(DECODE))
    def hang_up(self, address: str) -> None:
        if address in self.world.workers:
            self.world.hang_up(address)

    @rule(name=st.sampled_from(WORKERS))
    def close_watch(self, name: str) -> None:
        self.world.close_watch(f"{name}:1")

    @rule(name=st.sampled_from(WORKERS), sequence=st.integers(-1, 9))
    def lose_watch_events(self, name: str, sequence: int) -> None:
        """An event out of turn: the watch is opened again."""
        address = f"{name}:1"
        if address in self.world.watching and sequence != self.world.watching[address]:
            event = WatchEvent(sequence=sequence, status=self.worker(name).status())
            self.world.apply(self.world.core.on_watch(address, event, self.world.now))
            assert address not in self.world.watching

    @rule(name=st.sampled_from(WORKERS), draining=st.booleans())
    def drain(self, name: str, draining: bool) -> None:
        self.worker(name).draining = draining

    @rule(name=st.sampled_from(WORKERS), fingerprint=st.sampled_from([b"weights", b"weights", b"others"]))
    def new_weights(self, name: str, fingerprint: bytes) -> None:
        """Restarted with another model."""
        self.die(name)
        self.worker(name).fingerprint = fingerprint
        self.come_back(name, same=False)

    @rule(members=st.sets(st.sampled_from(WORKERS)))
    def change_members(self, members: set[str]) -> None:
        for name in members - {worker.name for worker in self.world.workers.values()}:
            worker = self.worker(name)
            worker.restart()
            self.world.workers[worker.address] = worker
        self.world.apply(self.world.core.set_members([f"{name}:1" for name in members], self.world.now))
        self.world.connect()

    @rule(chance=st.sampled_from([0.0, 0.2]), fault=st.sampled_from(FAULTS))
    def misbehave(self, chance: float, fault: str) -> None:
        for worker in self.workers:
            worker.faults = Faults()
            setattr(worker.faults, fault, chance)

    # -- what nobody should say -----------------------------------------------------------------------------------

    @rule(data=st.data(), address=st.sampled_from(DECODE), kind=st.sampled_from(KINDS))
    def say(self, data: st.DataObject, address: str, kind: str) -> None:
        """Any word about any attempt, from a worker whose it may not be: at most the attempt itself is over by it."""
        if address not in self.world.sessions:
            return
        works = {w.submit.attempt: w for worker in self.workers for w in worker.works.values()}
        gone = [submit.attempt for worker in self.workers for submit in worker.gone]
        own = list(self.world.workers[address].works)
        attempt = data.draw(st.sampled_from([*own, *own, *own, *works, *gone, "", "nobody"]))
        work = works.get(attempt)
        offset, most = (work.emitted[0], work.submit.max_tokens) if work else (0, 3)
        self.world.deliver()
        before = self.books()
        worker = self.world.workers[address]
        mine = attempt in worker.works
        event = word(kind, attempt, offset, most)
        self.world.apply(self.world.core.on_session(address, event, self.world.now))
        if not mine:
            assert self.books() == before, "a word about another's attempt changed something"
        elif kind in ENDS_IT:
            worker._forget(attempt)

    @rule(address=st.sampled_from(DECODE), reason=st.sampled_from(["its engine died", ""]))
    def lost(self, address: str, reason: str) -> None:
        if address in self.world.sessions:
            event = pb.FromDecode(lost=pb.WorkerLost(reason=reason))
            self.world.apply(self.world.core.on_session(address, event, self.world.now))
            self.die(address.partition(":")[0])

    @rule(address=st.sampled_from(["stranger:1", *DECODE]))
    def streams_of_nobody(self, address: str) -> None:
        """Words on streams that are closed, or to an address that is no worker's."""
        if address in self.world.sessions:
            return
        before = self.books()
        self.world.apply(self.world.core.on_session(address, pb.FromDecode(lost=pb.WorkerLost()), self.world.now))
        if address == "stranger:1":
            self.world.apply(self.world.core.on_session(address, StreamOpened(), self.world.now))
            self.world.apply(self.world.core.on_watch(address, StreamClosed(), self.world.now))
        assert self.books() == before
        # Of a known worker this says that it did not take a new connection either: what ran there may be lost by it.
        self.world.apply(self.world.core.on_session(address, StreamClosed("again"), self.world.now))
        assert address in DECODE or self.books() == before

    # -- time -----------------------------------------------------------------------------------------------------

    @rule(steps=st.integers(1, 12), seconds=st.sampled_from([0.25, 0.25, 0.05, 1.0]))
    def advance(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.world.advance(seconds)

    @rule(seconds=st.floats(2, 60))
    def sleep(self, seconds: float) -> None:
        """This router itself was frozen."""
        self.world.now += seconds

    # -- what always holds ----------------------------------------------------------------------------------------

    def books(self) -> dict[str, int]:
        return self.world.core.gauges()

    @invariant()
    def audit(self) -> None:
        core = self.world.core
        core.check_integrity()
        gauges = core.gauges()
        clients = self.world.clients.values()
        assert gauges["requests"] == sum(not client.over for client in clients)
        assert gauges["queued"] + gauges["attempts"] == gauges["requests"]
        outcomes = {name: count for name, count in core.counters().items() if name.startswith("outcome_")}
        assert sum(outcomes.values()) == sum(client.over for client in clients) + self.overloaded
        assert outcomes.get("outcome_cancelled", 0) == self.cancelled
        told_later = [client for client in clients if any(isinstance(o, Overloaded) for o in client.outcomes)]
        assert outcomes.get("outcome_overloaded", 0) == self.overloaded + len(told_later)
        for client in told_later:  # it found nobody waiting, no room, and a pace too slow for its deadline
            assert not any(client.ids), "refused after it had been served"
        for client in clients:
            self.right_so_far(client)

    def right_so_far(self, client: Client) -> None:
        """At most one outcome; only tokens that any worker draws, in order; a success is whole."""
        assert len(client.outcomes) <= 1
        assert all(outcome is None or isinstance(outcome, HeadraceError) for outcome in client.outcomes)
        for index, ids in enumerate(client.ids):
            whole = expected(client.request, index)
            assert ids == whole[: len(ids)]
            if client.outcomes == [None] and index not in client.stopped:
                assert ids == whole, "a success with missing text"
                assert client.ends[index] is not None

    def teardown(self) -> None:
        """Everybody is well again: every request comes to its end, and nothing is held anywhere."""
        if not hasattr(self, "world"):
            return
        self.change_members(set(WORKERS))
        for worker in self.workers:
            worker.faults, worker.draining, worker.fingerprint = Faults(), False, b"weights"
            self.die(worker.name)
            self.come_back(worker.name, same=False)
        self.world.run()
        self.world.connect()
        self.audit()
        assert self.world.idle(), f"still held: {self.books()}"


TestDispatcher = quick(Dispatcher, examples=60, steps=30)
TestDispatcherLong = long(Dispatcher, examples=400, steps=60)
