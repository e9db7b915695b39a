"""The router's smaller machines: the waiting line, one request over its attempts, and what is known of a worker."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.core.errors import IntegrityError, Overloaded
from cluster.stubs.session_pb2 import TokenRun
from cluster.stubs.watch_pb2 import Removed, Snapshot, Status, Stored, WatchEvent
from router.follow import Follow, Phase, ProtocolBreach
from router.lanes import Entry
from router.placement import Demand, Placement
from router.prefix_index import PrefixIndex
from router.queue import HOLD_S, OVERTAKE_S, SCAN, AdmissionQueue, LineBounds
from router.records import record_of
from router.requests import Request, SamplingParams, Trace
from router.workers import Booking, WorkerView
from tests.stateful import long, quick
from tests.unit.router_core.fakes import FakeWorker, believed, token

LIMIT = 4
SUSPECT_S = 3.0
KEYS = [bytes([key]) * 16 for key in range(10)]


class Line(RuleBasedStateMachine):
    """AdmissionQueue against a plain list of (rank, arrival, id)."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = AdmissionQueue(LineBounds(LIMIT))
        self.now = 100.0
        self.line: list[tuple[int, int, str]] = []
        self.entries: dict[str, Entry] = {}  # all that were ever admitted and have not ended
        self.blocked: dict[str, float] = {}
        self.departed: dict[str, float] = {}  # after they had waited
        self.made = 0

    @rule(deadline_s=st.sampled_from([600.0, 0.001]))
    def admit(self, deadline_s: float) -> None:
        name = f"r{self.made + 1}"
        wait = self.queue.expected_wait_s(self.now)
        full = len(self.line) >= LIMIT
        request = Request(name, "x", (1, 2, 3), 4, deadline_s=deadline_s)
        waiting = len(self.line)  # all cost the same, and it would be one more
        late = bool(waiting) and wait is not None and wait * (waiting + 1) / waiting > deadline_s
        known = any(self.now - at < 10.0 for at in self.departed.values())  # nobody has left: nothing is sure
        refusal: Overloaded | None = None
        try:
            entry = self.queue.admit(request, self.now)
        except Overloaded as error:
            refusal = error
        if refusal is not None:
            assert full or late
            assert 1.0 <= refusal.retry_after_s <= 60.0
            return
        assert not full
        assert not (late and known)
        self.made += 1
        self.entries[name] = entry
        self.line.append((1, self.made, name))

    @precondition(lambda self: self.line)
    @rule(data=st.data(), how=st.sampled_from(["take", "drop", "drop twice"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        place = data.draw(st.sampled_from(self.line))
        self.line.remove(place)
        self.blocked.pop(place[2], None)
        if how == "take":
            if self.now > self.entries[place[2]].since:
                self.departed[place[2]] = self.now
            self.queue.take(place[2], self.now)
        else:
            self.queue.drop(place[2], self.now)
            self.entries.pop(place[2])
        if how == "drop twice":
            self.queue.drop(place[2], self.now)

    @precondition(lambda self: len(self.entries) > len(self.line))
    @rule(data=st.data(), returning=st.booleans())
    def put_back(self, data: st.DataObject, returning: bool) -> None:
        """One that was taken comes again, however full it is: in front, or where it was."""
        waiting = {name for _, _, name in self.line}
        name = data.draw(st.sampled_from([name for name in self.entries if name not in waiting]))
        entry = self.entries[name]
        entry.blocked_since = None
        if not returning:
            self.departed.pop(name, None)
        self.queue.put_back(entry, self.now, returning=returning, not_before=self.now)
        self.line.append((0 if returning else 1, entry.arrival, name))

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def wait_twice(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.line))[2]
        with pytest.raises(IntegrityError):
            self.queue.put_back(self.entries[name], self.now, returning=False, not_before=0.0)

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def no_room(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.line))[2]
        since = self.blocked.get(name)
        if since is None or self.now - since >= OVERTAKE_S + HOLD_S:
            self.blocked[name] = since = self.now
        assert self.queue.overdue(self.entries[name], self.now) == (self.now - since >= OVERTAKE_S)

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 31.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def agrees(self) -> None:
        self.queue.check_integrity()
        order = [name for _, _, name in sorted(self.line)]
        assert self.queue.ids() == order
        assert [entry.request_id for entry in self.queue.scan()] == order[:SCAN]
        assert len(self.queue) == len(order)
        assert all(name in self.queue for name in order)
        wait = self.queue.expected_wait_s(self.now)
        assert wait is None or wait >= 0


class OneRequest(RuleBasedStateMachine):
    """Follow: attempts begin and end in any way; what was delivered is delivered once and in order."""

    @initialize(n=st.integers(1, 3), max_tokens=st.integers(1, 8))
    def begin(self, n: int, max_tokens: int) -> None:
        self.request = Request("r", "x", (1, 2, 3), max_tokens, n, SamplingParams(seed=5))
        queue = AdmissionQueue(LineBounds(8))
        self.follow = Follow(self.request, record_of(self.request, Trace(), 0.0), queue.admit(self.request, 0.0), 0.0)
        self.truths = [[token([1, 2, 3], 5, i, at) for at in range(max_tokens)] for i in range(n)]
        self.got: list[list[int]] = [[] for _ in range(n)]
        self.ended: set[int] = set()
        self.attempts = 0

    def placement(self) -> tuple[Placement, Demand]:
        view = WorkerView("d:1", PrefixIndex(100), 0.5)
        for event in FakeWorker("d", "decode").hello():
            view.on_watch(event, 0.0)
        demand = self.follow.demand(0, may_force_local=False)
        return Placement(view.load(0.0), (), True, 0, 1.0), demand

    @precondition(lambda self: self.follow.phase is Phase.WAITING)
    @rule()
    def start(self) -> None:
        placement, demand = self.placement()
        attempt = self.follow.start(placement, demand, 1.0)
        self.attempts += 1
        assert attempt.id.endswith(str(self.attempts))
        submit = self.follow.submit(placement, 1.0)
        assert [list(sample.emitted) for sample in submit.samples] == self.got
        assert {i for i, sample in enumerate(submit.samples) if sample.finished} == self.ended

    @precondition(lambda self: self.follow.phase is not Phase.WAITING)
    @rule()
    def start_again(self) -> None:
        placement, demand = self.placement()
        with pytest.raises(RuntimeError):
            self.follow.start(placement, demand, 1.0)

    @precondition(lambda self: self.follow.phase is Phase.RUNNING)
    @rule(repeat=st.integers(0, 8), count=st.integers(0, 4), index=st.integers(0, 2), end=st.booleans())
    def hear(self, repeat: int, count: int, index: int, end: bool) -> None:
        """A run that may repeat what was delivered: only what is new comes out."""
        index %= self.request.n
        offset = max(0, len(self.got[index]) - repeat)
        ids = self.truths[index][offset:][: repeat + count]
        if end and offset + len(ids) < len(self.got[index]):
            end = False  # an end before what was delivered is a breach
        run = TokenRun(attempt="a", index=index, offset=offset, ids=ids, end="length" if end else "")
        event = self.follow.take(run, 2.0)
        new = [] if index in self.ended else ids[len(self.got[index]) - offset :]
        closes = end and index not in self.ended
        assert (event is None) == (not new and not closes)
        if event is not None:
            assert (list(event.ids), event.end) == (new, "length" if closes else None)
        self.got[index] += new
        if closes:
            self.ended.add(index)

    @precondition(lambda self: self.follow.phase is Phase.RUNNING)
    @rule(kind=st.sampled_from(["gap", "other", "before", "negative", "index", "end", "long", "logprobs"]),
          index=st.integers(0, 2))  # fmt: skip
    def breach(self, kind: str, index: int) -> None:
        """Each raises and changes nothing - unless the sample has ended: then nobody listens any more."""
        index %= self.request.n
        known = len(self.got[index])
        run = TokenRun(index=index, offset=known)
        match kind:
            case "gap":
                run.offset = known + 1
            case "other" if known:
                run.offset = known - 1
                run.ids.append(self.got[index][-1] + 1)
            case "before" if known:
                run.offset, run.end = 0, "eos"
            case "index":
                run.index = -1
            case "end":
                run.end = "because"
            case "long":
                run.ids.extend([1] * (self.request.max_tokens + 1))
            case "logprobs":
                run.ids.append(self.truths[index][0])
                run.logprobs.add()
                run.logprobs.add()
            case _:
                run.offset = -1
        if index in self.ended and kind not in ("index", "end"):
            assert self.follow.take(run, 2.0) is None
        else:
            with pytest.raises(ProtocolBreach):
                self.follow.take(run, 2.0)

    @precondition(lambda self: self.follow.phase is Phase.RUNNING)
    @rule()
    def lose(self) -> None:
        """The attempt is over; samples that have all their tokens end by themselves."""
        self.follow.leave()
        ended = {event.index for event in self.follow.exhausted()}
        whole = {i for i, got in enumerate(self.got) if len(got) == self.request.max_tokens}
        assert ended == whole - self.ended
        self.ended |= ended

    @precondition(lambda self: self.follow.phase is not Phase.RUNNING)
    @rule()
    def lose_nothing(self) -> None:
        with pytest.raises(RuntimeError):
            self.follow.leave()

    @rule(really=st.sampled_from([False] * 7 + [True]))
    def end(self, really: bool) -> None:
        """Valid in every phase, twice as well."""
        if really:
            self.follow.end()
            assert self.follow.end() is None
            assert self.follow.phase is Phase.ENDED

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "follow"):
            return
        assert [sample.emitted for sample in self.follow.samples] == self.got
        assert {i for i, sample in enumerate(self.follow.samples) if sample.finished} == self.ended
        assert self.follow.complete == (len(self.ended) == self.request.n)
        assert (self.follow.attempt is not None) == (self.follow.phase is Phase.RUNNING)


class OneWorker(RuleBasedStateMachine):
    """WorkerView: the states of its docstring, its keys, its bookings and its memory of failures, on plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeWorker("d", "decode")
        self.view = WorkerView("d:1", PrefixIndex(100), 0.5)
        self.now = 100.0
        self.sequence: int | None = None  # of the watch, None while it is closed
        self.seen = 0.0
        self.keys: set[bytes] = set()
        self.status: Status | None = None
        self.session: int | None = None  # the epoch it greeted with; 0 before, None while it is closed
        self.failures = 0
        self.cooling_until = 0.0

    @initialize(well=st.booleans())
    def begin(self, well: bool) -> None:
        if well:
            self.watch_opens(set(), False)
            self.session_opens("same")
            self.status_comes(True, False)

    def event(self, **what: object) -> None:
        assert self.sequence is not None
        self.sequence += 1
        assert self.view.on_watch(WatchEvent(sequence=self.sequence, **what), self.now)  # type: ignore[arg-type]
        self.seen = self.now

    @rule(keys=st.sets(st.integers(0, 9)), restarted=st.booleans())
    def watch_opens(self, keys: set[int], restarted: bool) -> None:
        if restarted:
            self.fake.restart()
        before = self.view.epoch
        self.view.watch_closed()
        self.sequence, self.status = 0, None
        hello, _, _ = self.fake.hello()
        self.event(hello=hello.hello)
        if self.view.epoch != before:
            self.view.new_peer()
            self.failures, self.cooling_until = 0, 0.0
        self.keys = {bytes([key]) * 16 for key in keys}
        self.event(snapshot=Snapshot(keys=b"".join(self.keys)))

    @rule()
    def watch_closes(self) -> None:
        self.view.watch_closed()
        self.sequence, self.status = None, None

    @precondition(lambda self: self.sequence is not None)
    @rule(key=st.integers(0, 9), stored=st.booleans())
    def cache_changes(self, key: int, stored: bool) -> None:
        packed = bytes([key]) * 16
        self.event(**({"stored": Stored(keys=packed)} if stored else {"removed": Removed(keys=packed)}))
        self.keys = self.keys | {packed} if stored else self.keys - {packed}

    @precondition(lambda self: self.sequence is not None)
    @rule(ready=st.booleans(), draining=st.booleans())
    def status_comes(self, ready: bool, draining: bool) -> None:
        self.status = Status(ready=ready, draining=draining, free_blocks=40)
        self.event(status=self.status)
        for booking in self.view.bookings.values():
            assert booking.reported == booking.acknowledged

    @rule(sequence=st.integers(-1, 30), hello=st.booleans())
    def event_out_of_turn(self, sequence: int, hello: bool) -> None:
        """It says that events were lost, and changes nothing."""
        event = self.fake.hello()[0] if hello else WatchEvent(status=Status(ready=True))
        event.sequence = sequence
        if sequence == (self.sequence or 0) + 1 and hello == (sequence == 1):
            return
        before = (believed(self.view, KEYS), self.view.status, self.view.facts, self.view.watch.last_seen)
        assert not self.view.on_watch(event, self.now)
        assert before == (believed(self.view, KEYS), self.view.status, self.view.facts, self.view.watch.last_seen)

    @rule(greets=st.sampled_from(["not yet", "same", "another"]))
    def session_opens(self, greets: str) -> None:
        self.view.session.open = True
        self.session = {"not yet": 0, "same": self.fake.epoch, "another": 10**6}[greets]
        self.view.session.epoch = self.session

    @rule()
    def session_closes(self) -> None:
        self.view.session_closed()
        self.session = None

    @rule(member=st.booleans())
    def membership(self, member: bool) -> None:
        self.view.member = member

    @rule(name=st.sampled_from("abc"), acknowledged=st.booleans())
    def book(self, name: str, acknowledged: bool) -> None:
        self.view.bookings[name] = Booking(3, 2, 1, acknowledged)

    @rule(name=st.sampled_from("abc"))
    def unbook(self, name: str) -> None:
        self.view.bookings.pop(name, None)

    @rule(how=st.sampled_from(["failed", "succeeded", "accepted", "refused"]))
    def happens(self, how: str) -> None:
        health = self.view.health
        if how == "failed":
            health.failed(self.now)
            self.failures += 1
            self.cooling_until = self.now + min(30.0, 0.5 * 2 ** (self.failures - 1))
        elif how == "succeeded":
            health.succeeded()
            self.failures = 0
        elif how == "accepted":
            health.accepted()
        else:
            health.refused(5, 0.1, self.now)
            assert 0 < health.refused_until - self.now <= 2.0
            assert self.view.status is None or self.view.load(self.now).room_blocks < health.refused_blocks

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.1, 40.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def agrees(self) -> None:
        expected = "ready"
        if self.sequence is None or self.session is None or self.session != self.fake.epoch:
            expected = "connecting"
        elif self.now - self.seen > SUSPECT_S:
            expected = "suspect"
        elif self.status is None or not self.status.ready:
            expected = "starting"
        elif self.status.draining or not self.view.member:
            expected = "draining"
        assert self.view.state(self.now, SUSPECT_S) == expected
        if self.sequence is None:
            return
        assert believed(self.view, KEYS) == self.keys
        assert self.view.index.entries == len(self.keys)
        if self.status is not None:
            load = self.view.load(self.now)
            fresh = [b for b in self.view.bookings.values() if not b.reported]
            assert load.queued_tokens == 3 * len(fresh)
            assert load.room_blocks <= 40 - 2 * len(fresh)
            trying = self.failures > 0 and (self.now < self.cooling_until or bool(self.view.bookings))
            assert load.cooling == trying, "one request tries out a worker that failed, and no second one"


TestLine = quick(Line, examples=60, steps=30)
TestLineLong = long(Line, examples=500, steps=80)
TestOneRequest = quick(OneRequest, examples=60, steps=30)
TestOneRequestLong = long(OneRequest, examples=500, steps=60)
TestOneWorker = quick(OneWorker, examples=60, steps=30)
TestOneWorkerLong = long(OneWorker, examples=500, steps=60)
