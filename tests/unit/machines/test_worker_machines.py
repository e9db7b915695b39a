"""The workers' smaller machines: tokens on their way to a router, and whether an engine has to poll for its readers."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.stubs.common_pb2 import TokenLogprob
from cluster.stubs.session_pb2 import TokenRun
from decode_worker.outbox import Outbox
from prefill_worker.readers import HELP_S, Readers
from tests.stateful import long, quick

INTERVAL_S = 0.5
ENDS = st.sampled_from(["", "", "eos"])
LINKS = st.sampled_from(["d0", "d1", "d2"])


class Sending(RuleBasedStateMachine):
    """Outbox: every token once, in order, none early and none late."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox(INTERVAL_S)
        self.now = 100.0
        self.last = float("-inf")
        self.waiting: dict[tuple[str, int], list[int]] = {}
        self.urgent = False
        self.written: dict[tuple[str, int], int] = {}
        self.heard: dict[tuple[str, int], list[int]] = {}
        self.ended: set[tuple[str, int]] = set()

    @rule(attempt=st.sampled_from("ab"), index=st.integers(0, 1), logprob=st.booleans(), end=ENDS)
    def write(self, attempt: str, index: int, logprob: bool, end: str) -> None:
        sample = (attempt, index)
        if sample in self.ended:
            return
        offset = self.written.get(sample, 0)
        self.written[sample] = offset + 1
        words = [TokenLogprob(logprob=-1.0)] if logprob else []
        run = TokenRun(attempt=attempt, index=index, offset=offset, ids=[1000 + offset], logprobs=words, end=end)
        self.outbox.add(run)
        self.waiting.setdefault(sample, []).append(1000 + offset)
        self.urgent = self.urgent or offset == 0 or bool(end)
        if end:
            self.ended.add(sample)

    @rule(force=st.booleans())
    def flush(self, force: bool) -> None:
        due = bool(self.waiting) and (force or self.urgent or self.now >= self.last + INTERVAL_S)
        message = self.outbox.flush(self.now, force=force)
        assert (message is not None) == due
        if message is None:
            return
        assert {(run.attempt, run.index): list(run.ids) for run in message.tokens.runs} == self.waiting
        for run in message.tokens.runs:
            heard = self.heard.setdefault((run.attempt, run.index), [])
            assert run.offset == len(heard), "a gap or a repetition"
            heard += run.ids
            assert bool(run.end) == ((run.attempt, run.index) in self.ended)
        self.waiting, self.urgent, self.last = {}, False, self.now

    @rule(seconds=st.sampled_from([0.1, 0.5, 3.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def due_in_time(self) -> None:
        due = self.outbox.due(self.now)
        assert (due is None) == (not self.waiting)
        assert due is None or due <= max(self.now, self.last + INTERVAL_S)

    def teardown(self) -> None:
        self.flush(force=True)
        assert all(ids == [1000 + at for at in range(self.written[sample])] for sample, ids in self.heard.items())
        assert set(self.heard) == set(self.written)


class Polling(RuleBasedStateMachine):
    """Readers: the engine polls exactly while somebody may need it, and is told of changes only."""

    def __init__(self) -> None:
        super().__init__()
        self.readers = Readers()
        self.now = 100.0
        self.open: dict[str, bool | None] = {}  # link -> whether its reads need help; None while it connects
        self.asked: dict[str, float] = {}
        self.jobs: set[str] = set()
        self.serving = False

    @rule(link=LINKS)
    def opens(self, link: str) -> None:
        if link not in self.open:
            self.open[link] = None
            self.readers.opened(link)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), needs=st.booleans())
    def warms(self, data: st.DataObject, needs: bool) -> None:
        """Connected; or, later, in trouble with reads that hang."""
        link = data.draw(st.sampled_from(sorted(self.open)))
        self.open[link] = needs
        if needs:
            self.asked[link] = self.now
        self.readers.warmed(link, self.now, needs_polling=needs)

    @rule(link=LINKS, twice=st.booleans())
    def closes(self, link: str, twice: bool) -> None:
        self.open.pop(link, None)
        self.asked.pop(link, None)
        self.jobs.discard(link)
        for _ in range(1 + twice):
            self.readers.closed(link)

    @rule(link=LINKS, on=st.booleans())
    def job(self, link: str, on: bool) -> None:
        self.jobs = self.jobs | {link} if on and link in self.open else self.jobs - {link}

    @rule(seconds=st.sampled_from([0.1, HELP_S, 5.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def polls_when_needed(self) -> None:
        connecting = None in self.open.values()
        reading = any(self.open[link] for link in self.jobs)
        asked = any(self.now < at + HELP_S for at in self.asked.values())
        needed = connecting or reading or asked
        assert self.readers.change(self.jobs, self.now) == (None if needed == self.serving else needed)
        assert self.readers.change(self.jobs, self.now) is None, "told twice"
        self.serving = needed


TestSending = quick(Sending, examples=50, steps=30)
TestSendingLong = long(Sending, examples=500, steps=60)
TestPolling = quick(Polling, examples=50, steps=30)
TestPollingLong = long(Polling, examples=500, steps=60)
