"""Worker cores in one thread: real brains, real engines on real memory, streams that are queues.

Engines run the tracer unless `model_factory` makes another model for the engine of a given name.

Every queue keeps its own order; which queue moves next is drawn from a seed. Nothing waits and nothing sleeps, so one
request takes about a millisecond and a failing seed replays exactly.
"""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from cluster.core.clock import ManualClock
from cluster.core.config import ClusterConfig
from cluster.core.ids import agent_name
from cluster.core.protocol import PROTOCOL
from cluster.stubs.common_pb2 import Layout, Sampling, WorkerAddress, WorkerIdentity
from cluster.stubs.link_pb2 import PrefillHello
from cluster.stubs.session_pb2 import (
    AttemptSettled,
    CancelAttempt,
    FromRouter,
    ResumeAttempt,
    RouterHello,
    SampleState,
    Submit,
)
from decode_worker.core import DecodeCore
from decode_worker.effects import Dial, HangUp, ToPrefill, ToRouter
from decode_worker.effects import ToEngine as DecodeToEngine
from decode_worker.state import Facts
from engine.channel import Codec
from engine.messages import (
    AddPeer,
    Command,
    Read,
    Report,
    TracerModel,
)
from engine.model.base import Model
from engine.model.loader import load_model
from engine.pool import HostMemory
from prefill_worker.core import PrefillCore
from prefill_worker.effects import ToDecode
from prefill_worker.effects import ToEngine as PrefillToEngine
from tests.fakes.answer import Answer
from tests.fakes.engine import FakeEngine

Deliver = Callable[[], None]
ROUTER = 1  # the epoch of the only router
_codec = Codec()
ModelFactory = Callable[[str], Model]  # the name of an engine -> its model; each engine binds its own


class World:
    """Some prefill and decode workers and one router's view of them."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        prefill: int = 1,
        decode: int = 1,
        seed: int = 0,
        model_factory: ModelFactory | None = None,
        sources: Mapping[str, bytes] | None = None,
    ) -> None:
        """`sources`: of the decode workers, the fingerprints by KV dtype whose blocks they convert."""
        self.config = config
        self._make_model = model_factory or self._tracer
        self.clock = ManualClock()
        self.random = random.Random(seed)
        self.queues: dict[str, deque[Deliver]] = defaultdict(deque)
        self.memories: dict[str, HostMemory] = {}
        self.engines: dict[str, FakeEngine] = {}
        self.prefill: dict[str, PrefillCore] = {}
        self.decode: dict[str, DecodeCore] = {}
        self.answers: dict[str, Answer] = defaultdict(Answer)
        self.sessions: dict[str, str] = {}  # decode worker -> the session that is open with it
        self._sources = sources
        self._number = 0
        self._session = 1
        for i in range(prefill):
            self.add_prefill(f"prefill-{i}")
        for i in range(decode):
            self.add_decode(f"decode-{i}")

    # -- building -------------------------------------------------------------------------------------------------

    def _tracer(self, _: str) -> Model:
        spec = TracerModel(**self.config.engine.tracer.model_dump())
        return load_model(spec, self.config.engine.block_size, threads=1)

    def _engine(self, name: str, role: Any) -> FakeEngine:
        model = self._make_model(name)
        engine = FakeEngine(self.config, model, self.config.num_blocks(role), self.clock, self.memories)
        self.engines[name] = engine
        self.memories[agent_name(name, 1)] = engine.memory
        return engine

    def _identity(self, name: str, role: str, engine: FakeEngine) -> WorkerIdentity:
        layout = engine.model.layout
        wire = Layout(
            layers=layout.layers, kv_heads=layout.kv_heads, head_dim=layout.head_dim,
            block_size=layout.block_size, dtype=layout.dtype,
        )  # fmt: skip
        return WorkerIdentity(
            worker=name,
            epoch=1,
            role=role,
            address=name,
            layout=wire,
            fingerprint=engine.model.fingerprint,
            protocol=PROTOCOL,
            sources=self._sources if role == "decode" else None,
        )

    def add_prefill(self, name: str) -> None:
        engine = self._engine(name, "prefill")
        hello = PrefillHello(
            identity=self._identity(name, "prefill", engine),
            agent=agent_name(name, 1),
            agent_metadata=b"m",
            pool_address=engine.memory.pool_address,
            block_bytes=engine.model.layout.block_bytes,
            transport="world",
        )
        model = engine.model
        self.prefill[name] = PrefillCore(self.config, hello, vocab_size=model.vocab_size, max_context=model.max_context)

    def add_decode(self, name: str) -> None:
        engine = self._engine(name, "decode")
        model = engine.model
        facts = Facts(
            self._identity(name, "decode", engine), model.layout, model.vocab_size, model.max_context,
            frozenset(model.eos_ids),
        )  # fmt: skip
        core = self.decode[name] = DecodeCore(self.config, facts)
        self.sessions[name] = "router"
        assert core.session_opened("router", RouterHello(epoch=ROUTER, session=1), self.clock.now())
        self._decode_effects(name)

    # -- a router's side ------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        decode: str = "decode-0",
        prefill: list[str] | None = None,
        n: int = 1,
        sampling: Sampling | None = None,
        histories: list[SampleState] | None = None,
        **fields: Any,
    ) -> str:
        """Send a Submit; returns the attempt id. `prefill` None: every prefill worker, in order."""
        self._number += 1
        attempt = f"attempt-{self._number}"
        names = list(self.prefill) if prefill is None else prefill
        submit = Submit(
            attempt=attempt,
            prompt=prompt,
            samples=histories or [SampleState() for _ in range(n)],
            max_tokens=max_tokens,
            sampling=sampling or Sampling(top_p=1.0, logprobs=-1),
            prefill=[WorkerAddress(worker=p, epoch=1, address=p) for p in names],
            deadline_s=fields.pop("deadline_s", 600.0),
            **fields,
        )
        self.answers[attempt] = Answer(decode=decode, histories=list(submit.samples))
        self._to_decode(decode, FromRouter(submit=submit))
        return attempt

    def cancel(self, attempt: str, *, decode: str = "decode-0") -> None:
        self._to_decode(decode, FromRouter(cancel=CancelAttempt(attempt=attempt)))

    def _to_decode(self, name: str, message: FromRouter) -> None:
        session = self.sessions.get(name)

        def deliver() -> None:
            if session is not None and session == self.sessions.get(name):
                self.decode[name].from_router(session, message, self.clock.now())
                self._decode_effects(name)

        self.queues[f"router>{name}"].append(deliver)

    def hang_up(self, name: str = "decode-0") -> None:
        """The session breaks, with all that is under way on it; both sides live."""
        self.decode[name].session_closed(self.sessions.pop(name), self.clock.now())
        self._decode_effects(name)

    def come_back(self, name: str = "decode-0", *, without: Iterable[str] = ()) -> None:
        """A new session, whose hello names every attempt that is not over, but those in `without`."""
        self._session += 1
        session = self.sessions[name] = f"router again {self._session}"
        attempts = [
            ResumeAttempt(
                attempt=attempt,
                next_offsets=[answer.offset(i) for i in range(len(answer.histories))],
                next_scored=answer.next_scored(),
            )
            for attempt, answer in self.answers.items()
            if answer.decode == name and not answer.over and attempt not in without
        ]
        hello = RouterHello(epoch=ROUTER, session=self._session, attempts=attempts)
        assert self.decode[name].session_opened(session, hello, self.clock.now())
        self._decode_effects(name)

    def _receive(self, name: str, effect: ToRouter) -> None:
        if effect.session != self.sessions.get(name):
            return
        message = effect.message
        kind = message.WhichOneof("message")
        if kind == "tokens":
            for run in message.tokens.runs:
                answer = self.answers[run.attempt]
                got = answer.tokens[run.index]
                start = answer.starts.setdefault(run.index, run.offset)
                assert run.offset == start + len(got), f"gap or repeat at offset {run.offset} of {run.attempt}"
                got += run.ids
                if run.end:
                    assert run.index not in answer.ends, "a sample ended twice"
                    answer.ends[run.index] = run.end
                    self._settle(run.attempt)
        elif kind != "hello":
            inner = getattr(message, kind or "")
            answer = self.answers[inner.attempt]
            answer.events.append(message)
            if kind in ("refused", "failed", "no_prefill", "preempted", "unknown"):
                answer.lost = f"{kind}: {getattr(inner, 'reason', '')}"
                self._settle(inner.attempt)

    def _settle(self, attempt: str) -> None:
        """The router knows how it ended."""
        answer = self.answers[attempt]
        if answer.decode and answer.over:
            self._to_decode(answer.decode, FromRouter(ended=AttemptSettled(attempt=attempt)))

    # -- carrying effects -----------------------------------------------------------------------------------------

    def _command(self, name: str, command: Command, report: Callable[[Report], None]) -> None:
        """Reads go their own way, beside the steps, as in a real engine. What its socket could not carry fails here."""
        _codec.encode(command)
        lane = "wire" if isinstance(command, Read | AddPeer) else "main"

        def run() -> None:
            result = self.engines[name].handle(command)
            if result is not None:
                self.queues[f"{name}:{lane}>"].append(lambda: report(result))

        self.queues[f">{name}:{lane}"].append(run)

    def _decode_effects(self, name: str) -> None:
        core = self.decode[name]

        def report(result: Report) -> None:
            core.from_engine(result, self.clock.now())
            self._decode_effects(name)

        for effect in core.take_effects():
            if isinstance(effect, DecodeToEngine):
                self._command(name, effect.command, report)
            elif isinstance(effect, ToRouter):
                self.queues[f"{name}>router"].append(partial(self._receive, name, effect))
            elif isinstance(effect, ToPrefill):
                self._link_send(name, effect)
            elif isinstance(effect, Dial):
                self._dial(name, effect)
            elif isinstance(effect, HangUp):
                self._hang_up(name, effect)
            else:
                raise AssertionError(f"{name} is lost: {effect}")

    def _link_send(self, name: str, effect: ToPrefill) -> None:
        peer = effect.peer.rsplit("-", 1)[0]

        def deliver() -> None:
            if peer in self.prefill:
                self.prefill[peer].from_decode(name, effect.message, self.clock.now())
                self._prefill_effects(peer)

        self.queues[f"{name}>{peer}"].append(deliver)

    def _dial(self, name: str, effect: Dial) -> None:
        peer = effect.address.worker

        def deliver() -> None:
            if peer in self.prefill:
                self.prefill[peer].link_opened(name, self.decode[name].state.facts.identity, self.clock.now())
                self._prefill_effects(peer)
            else:
                self.decode[name].link_closed(effect.peer, "nobody answers", self.clock.now())
                self._decode_effects(name)

        self.queues[f"{name}>{peer}"].append(deliver)

    def _hang_up(self, name: str, effect: HangUp) -> None:
        peer = effect.peer.rsplit("-", 1)[0]

        def deliver() -> None:
            if peer in self.prefill:
                self.prefill[peer].link_closed(name, self.clock.now())
                self._prefill_effects(peer)

        self.queues[f"{name}>{peer}"].append(deliver)

    def _prefill_effects(self, name: str) -> None:
        core = self.prefill[name]

        def report(result: Report) -> None:
            core.from_engine(result, self.clock.now())
            self._prefill_effects(name)

        for effect in core.take_effects():
            if isinstance(effect, PrefillToEngine):
                self._command(name, effect.command, report)
            elif isinstance(effect, ToDecode):
                self.queues[f"{name}>{effect.link}"].append(partial(self._from_prefill, name, effect))
            else:
                raise AssertionError(f"{name} is lost: {effect}")

    def _from_prefill(self, name: str, effect: ToDecode) -> None:
        core, peer, message = self.decode[effect.link], agent_name(name, 1), effect.message
        if message.WhichOneof("message") == "hello":
            core.link_opened(peer, message.hello, self.clock.now())
        else:
            core.from_prefill(peer, message, self.clock.now())
        self._decode_effects(effect.link)

    # -- running --------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Deliver one message. False when none is under way."""
        ready = [name for name, queue in self.queues.items() if queue]
        if not ready:
            return False
        self.queues[self.random.choice(ready)].popleft()()
        return True

    def run(self, *, check: bool = False) -> None:
        """Deliver until nothing moves, letting time pass for outboxes; with `check`, audit after every message."""
        for _ in range(1_000_000):
            if self.step():
                if check:
                    self.check_integrity()
                continue
            self.clock.advance(0.01)
            for name, core in self.decode.items():
                core.flush(self.clock.now())
                self._decode_effects(name)
            if not any(self.queues.values()):
                return
        raise AssertionError("this never ends")

    def tick(self, seconds: float) -> None:
        """Let time pass, in tenths of a second."""
        for _ in range(max(1, int(seconds * 10))):
            self.clock.advance(0.1)
            for name, decode in self.decode.items():
                decode.tick(self.clock.now())
                self._decode_effects(name)
            for name, prefill in self.prefill.items():
                prefill.tick(self.clock.now())
                self._prefill_effects(name)

    def wait(self, seconds: float) -> None:
        """Let time pass while messages move."""
        for _ in range(max(1, int(seconds * 10))):
            self.tick(0.1)
            self.run()

    def kill_prefill(self, name: str) -> None:
        """The worker is gone: nothing of it is delivered any more, reads from it fail, its links break."""
        del self.prefill[name]
        del self.memories[agent_name(name, 1)]
        for lane, queue in self.queues.items():
            if lane.startswith((name, f">{name}")):
                queue.clear()
        for decode, core in self.decode.items():
            core.link_closed(agent_name(name, 1), "died", self.clock.now())
            self._decode_effects(decode)

    def check_integrity(self) -> None:
        cores: list[DecodeCore | PrefillCore] = [*self.decode.values(), *self.prefill.values()]
        for core in cores:
            core.check_integrity()

    def assert_quiet(self) -> None:
        """Nothing is in use anywhere (I2)."""
        self.check_integrity()
        cores: list[tuple[str, DecodeCore | PrefillCore]] = [*self.decode.items(), *self.prefill.items()]
        for name, core in cores:
            used = {k: v for k, v in core.status().gauges.items() if v}
            assert not used, f"{name} still holds {used}"
