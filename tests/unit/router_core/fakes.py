"""A scripted worker of either role: answers with tokens from a function of the request, and misbehaves on order."""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.core.protocol import PROTOCOL
from cluster.stubs import session_pb2 as pb
from cluster.stubs.common_pb2 import Layout, WorkerIdentity
from cluster.stubs.watch_pb2 import Rates, Snapshot, Status, WatchEvent, WatchHello
from router.requests import Request
from router.workers import WorkerView

BLOCK = 4


def token(prompt: list[int], seed: int, index: int, position: int) -> int:
    """What any worker draws at `position` of sample `index`: a function of the request alone."""
    return (sum(prompt) * 31 + seed * 17 + index * 7 + position * 13) % 1009


def length(prompt: list[int], index: int, max_tokens: int) -> int:
    """How many tokens sample `index` has before it ends."""
    return 1 + (sum(prompt) + 5 * index) % max_tokens


def expected(request: Request, index: int) -> list[int]:
    """All tokens of one sample of a request."""
    prompt = list(request.prompt)
    count = length(prompt, index, request.max_tokens)
    return [token(prompt, request.sampling.seed, index, at) for at in range(count)]


def believed(view: WorkerView, keys: Iterable[bytes]) -> set[bytes]:
    """Those of the keys that the router believes this worker to hold."""
    return {key for key in keys if view.number is not None and view.number in view.index.match([key])}


def request(name: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 6, n: int = 1, **more: float) -> Request:
    return Request(name, f"public-{name}", prompt, max_tokens, n, deadline_s=more.get("deadline_s", 600.0))


@dataclass(slots=True)
class Faults:
    """Chances per message or step."""

    refuse: float = 0.0
    no_prefill: float = 0.0
    preempt: float = 0.0
    fail: float = 0.0
    die: float = 0.0
    repeat: float = 0.0
    gap: float = 0.0
    late: float = 0.0
    hang_up: float = 0.0


@dataclass(slots=True)
class Work:
    """One attempt on a fake decode worker."""

    submit: pb.Submit
    emitted: list[int]
    finished: list[bool]


@dataclass(slots=True)
class FakeWorker:
    """Either role. A decode worker answers Submit with `token`; `Faults` says how badly it behaves."""

    name: str
    role: str
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    faults: Faults = field(default_factory=Faults)
    epoch: int = 1
    blocks: int = 64
    fingerprint: bytes = b"weights"
    max_context: int = 256
    queued_tokens: int = 0
    window_tokens: int = 0
    chunk_tokens: int = 0
    up: bool = True
    draining: bool = False
    works: dict[str, Work] = field(default_factory=dict)
    gone: list[pb.Submit] = field(default_factory=list)  # ended attempts, of which something may still come late
    received: list[pb.FromRouter] = field(default_factory=list)
    out: deque[pb.FromDecode] = field(default_factory=deque)

    @property
    def address(self) -> str:
        return f"{self.name}:1"

    def identity(self) -> WorkerIdentity:
        layout = Layout(layers=2, kv_heads=2, head_dim=8, block_size=BLOCK, dtype="float32")
        return WorkerIdentity(
            worker=self.name,
            epoch=self.epoch,
            role=self.role,
            address=self.address,
            layout=layout,
            fingerprint=self.fingerprint,
            protocol=PROTOCOL,
        )

    def free(self) -> int:
        return self.blocks - sum(self._held(work) for work in self.works.values())

    def hello(self, keys: bytes = b"") -> list[WatchEvent]:
        """What a new watch stream begins with."""
        hello = WatchHello(
            identity=self.identity(),
            vocab_size=1009,
            max_context=self.max_context,
            eos_ids=[2],
            num_blocks=self.blocks,
            block_size=BLOCK,
        )
        return [
            WatchEvent(sequence=1, hello=hello),
            WatchEvent(sequence=2, snapshot=Snapshot(keys=keys)),
            WatchEvent(sequence=3, status=self.status()),
        ]

    def status(self) -> Status:
        return Status(
            ready=True,
            draining=self.draining,
            free_blocks=self.free(),
            running=len(self.works),
            queued_tokens=self.queued_tokens,
            queue=[self.queued_tokens] if self.queued_tokens else [],
            window_tokens=self.window_tokens,
            rates=Rates(chunk_tokens=self.chunk_tokens),
        )

    def take(self, message: pb.FromRouter) -> None:
        """One message from the router."""
        self.received.append(message)
        match message.WhichOneof("message"):
            case "hello":
                self.out.clear()  # what found no session is lost
                self.out.append(pb.FromDecode(hello=self.identity()))
                self._resume(message.hello)
            case "submit":
                self._on_submit(message.submit)
            case "cancel":
                self._forget(message.cancel.attempt)
            case "stop_seq":
                work = self.works.get(message.stop_seq.attempt)
                if work is not None:
                    work.finished[message.stop_seq.index] = True
            case "ended":
                self._forget(message.ended.attempt)

    def step(self) -> None:
        """Every attempt goes on by a few tokens, or meets its fate."""
        for work in list(self.works.values()):
            attempt = work.submit.attempt
            if self._happens(self.faults.preempt):
                self.out.append(pb.FromDecode(preempted=pb.Preempted(attempt=attempt)))
                self._forget(attempt)
            elif self._happens(self.faults.fail):
                self.out.append(pb.FromDecode(failed=pb.AttemptFailed(attempt=attempt, reason="a fault")))
                self._forget(attempt)
            else:
                self._emit(work)
        if self.gone and self._happens(self.faults.late):
            submit = self.rng.choice(self.gone)
            run = pb.TokenRun(attempt=submit.attempt, index=0, offset=0, ids=[999_999], end="eos")
            self.out.append(pb.FromDecode(tokens=pb.Tokens(runs=[run])))

    def restart(self) -> None:
        """A new process on the same address, with nothing of the old one."""
        self.epoch += 1
        self.works.clear()
        self.gone.clear()
        self.out.clear()
        self.up = True

    def _on_submit(self, submit: pb.Submit) -> None:
        prompt = list(submit.prompt)
        for index, sample in enumerate(submit.samples):
            drawn = [token(prompt, submit.sampling.seed, index, at) for at in range(len(sample.emitted))]
            assert list(sample.emitted) == drawn, "history that was never drawn"
        assert submit.attempt not in self.works
        work = Work(submit, [len(s.emitted) for s in submit.samples], [s.finished for s in submit.samples])
        if self._happens(self.faults.refuse) or self._held(work) > self.free():
            refused = pb.AttemptRefused(attempt=submit.attempt, reason="full", free_blocks=self.free())
            self.out.append(pb.FromDecode(refused=refused))
        elif submit.prefill and self._happens(self.faults.no_prefill):
            asked = pb.PrefillOn(attempt=submit.attempt, worker=submit.prefill[0].worker)
            self.out.append(pb.FromDecode(prefill_on=asked))
            self.out.append(
                pb.FromDecode(no_prefill=pb.NoPrefill(attempt=submit.attempt, reason="busy", retry_after_s=0.2))
            )
        else:
            self.works[submit.attempt] = work
            where = submit.prefill[0].worker if submit.prefill else "local"
            self.out.append(pb.FromDecode(prefill_on=pb.PrefillOn(attempt=submit.attempt, worker=where)))

    def _resume(self, hello: pb.RouterHello) -> None:
        """Go on where the router stands; what it does not name is over."""
        wanted = {resume.attempt: resume for resume in hello.attempts}
        for attempt in [a for a in self.works if a not in wanted]:
            self._forget(attempt)
        for attempt, resume in wanted.items():
            work = self.works.get(attempt)
            if work is None:
                self.out.append(pb.FromDecode(unknown=pb.UnknownAttempt(attempt=attempt)))
                continue
            for index, offset in enumerate(resume.next_offsets):
                assert offset <= work.emitted[index], "a router that is ahead of its worker"
                if offset >= 0 and (offset < work.emitted[index] or work.finished[index]):
                    self._replay(work, index, offset)

    def _replay(self, work: Work, index: int, offset: int) -> None:
        prompt, seed = list(work.submit.prompt), work.submit.sampling.seed
        ids = [token(prompt, seed, index, at) for at in range(offset, work.emitted[index])]
        end = "length" if work.finished[index] else ""
        run = pb.TokenRun(attempt=work.submit.attempt, index=index, offset=offset, ids=ids, end=end)
        self.out.append(pb.FromDecode(tokens=pb.Tokens(runs=[run])))

    def _emit(self, work: Work) -> None:
        submit = work.submit
        prompt = list(submit.prompt)
        runs = []
        for index, known in enumerate(work.emitted):
            if work.finished[index]:
                continue
            total = length(prompt, index, submit.max_tokens)
            until = min(total, known + self.rng.randint(1, 3))
            start = self.rng.randint(0, known) if self._happens(self.faults.repeat) else known
            if self._happens(self.faults.gap) and known + 1 < until:
                start = known + 1
            ids = [token(prompt, submit.sampling.seed, index, at) for at in range(start, until)]
            work.emitted[index] = until
            work.finished[index] = until == total
            end = "" if until < total else "length"
            runs.append(pb.TokenRun(attempt=submit.attempt, index=index, offset=start, ids=ids, end=end))
        if runs:
            self.out.append(pb.FromDecode(tokens=pb.Tokens(runs=runs)))

    def _held(self, work: Work) -> int:
        samples = len(work.emitted)
        return -(-len(work.submit.prompt) // BLOCK) + samples * -(-work.submit.max_tokens // BLOCK)

    def _forget(self, attempt: str) -> None:
        work = self.works.pop(attempt, None)
        if work is not None:
            self.gone.append(work.submit)

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance
