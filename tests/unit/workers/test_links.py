"""Links of a decode worker: to which life of a prefill worker they lead, and that they come back (FAULTS F01)."""

from cluster.core.ids import agent_name
from cluster.stubs.common_pb2 import WorkerAddress
from cluster.stubs.link_pb2 import FromDecodePeer, FromPrefill, JobFailed, PrefillHello
from decode_worker.core import DecodeCore
from decode_worker.effects import Dial, Effect, HangUp, ToEngine, ToPrefill
from engine.messages import AddPeer, DropPeer, PeerAdded
from tests.fakes.world import World
from tests.unit.workers.test_tracer_matrix import B, config, expected, prompt

OLD, NEW = (agent_name("prefill-0", epoch) for epoch in (1, 2))


def core_alone() -> tuple[DecodeCore, PrefillHello]:
    """A decode core whose effects the test looks at, and a prefill worker's hello in its second life."""
    world = World(config())
    core, hello = world.decode["decode-0"], PrefillHello()
    hello.CopyFrom(world.prefill["prefill-0"]._hello)
    hello.identity.epoch, hello.agent = 2, NEW
    core.take_effects()
    return core, hello


def address(epoch: int) -> WorkerAddress:
    return WorkerAddress(worker="prefill-0", epoch=epoch, address="prefill-0")


def dials(effects: list[Effect]) -> list[str]:
    return [effect.peer for effect in effects if isinstance(effect, Dial)]


def test_a_dial_that_finds_a_later_life_takes_nothing_from_the_link_to_that_life() -> None:
    """Found by simulation: the first link to a restarted worker never became readable, because the engine's word about
    its agent went to a link that had been dialled for the life before; hand-offs to it waited for their deadline."""
    core, hello = core_alone()
    core.warm([address(1)])
    core.link_opened(OLD, hello, 0.0)
    core.warm([address(2)])
    core.link_opened(NEW, hello, 0.1)
    effects = core.take_effects()
    assert dials(effects) == [OLD, NEW]
    assert [e.peer for e in effects if isinstance(e, HangUp)] == [OLD], "that link is of no use and must not stay open"
    added = [e.command.peer for e in effects if isinstance(e, ToEngine) and isinstance(e.command, AddPeer)]
    assert added == [NEW]
    core.from_engine(PeerAdded(NEW, False, 1.0), 0.2)
    assert [e.peer for e in core.take_effects() if isinstance(e, ToPrefill)] == [NEW]
    peer = core.peers.get(NEW)
    assert peer is not None
    assert peer.readable
    assert core.peers.get(OLD) is None, "a life that is no member any more is forgotten"


def test_a_life_that_does_not_fit_is_remembered_while_it_is_a_member_and_not_dialled_again() -> None:
    core, hello = core_alone()
    hello.identity.fingerprint = b"other weights"
    core.warm([address(2)])
    core.link_opened(NEW, hello, 0.0)
    assert [e.peer for e in core.take_effects() if isinstance(e, HangUp)] == [NEW]
    for tenth in range(100):
        core.tick(tenth / 10)
    core.warm([address(2)])
    assert not dials(core.take_effects())
    core.warm([])
    assert core.peers.get(NEW) is None


def test_a_link_that_was_lost_comes_back_before_a_request_needs_it() -> None:
    core, hello = core_alone()
    core.warm([address(2)])
    core.link_opened(NEW, hello, 0.0)
    core.take_effects()
    core.link_closed(NEW, "connection reset", 1.0)
    effects = core.take_effects()
    assert [e.command.peer for e in effects if isinstance(e, ToEngine) and isinstance(e.command, DropPeer)] == [NEW]
    assert not dials(effects), "not at once: it may have died, and others dial too"
    redialled = []
    for tenth in range(11, 31):
        core.tick(tenth / 10)
        redialled += dials(core.take_effects())
    assert redialled == [NEW]
    core.link_closed(NEW, "UNAVAILABLE", 3.1)
    core.warm([])
    for tenth in range(32, 60):
        core.tick(tenth / 10)
    assert not dials(core.take_effects()), "who is no member is left alone"


def test_what_waits_for_a_link_that_does_not_fit_is_not_sent() -> None:
    core, hello = core_alone()
    peer = core.peers.reach(address(1))
    core.peers.send(peer, FromDecodePeer())
    core.link_opened(OLD, hello, 0.0)
    assert not [e for e in core.take_effects() if isinstance(e, ToPrefill)]


def test_the_router_hears_of_the_holder_that_takes_over() -> None:
    """A refusal is not the last word about where a prompt is read (proto/session.proto, PrefillOn)."""
    world = World(config(), prefill=2)
    world.prefill["prefill-0"].draining = True
    ids = prompt(5 * B)
    attempt = world.submit(ids, 5, ignore_eos=True)
    world.run(check=True)
    assert world.answers[attempt].tokens[0] == expected(ids, 5)
    assert world.answers[attempt].prefill_on == ["prefill-0", "prefill-1"]


def test_what_a_peer_says_never_names_a_counter() -> None:
    """Counters become metrics: their names are ours, few, and carry nobody's words."""
    world = World(config(), prefill=2)
    attempt = world.submit(prompt(5 * B), 5, ignore_eos=True)
    core = world.decode["decode-0"]
    while not core.handoffs.active:
        world.step()
    failed = FromPrefill(failed=JobFailed(attempt=attempt, reason="a secret word"))
    core.from_prefill(agent_name("prefill-0", 1), failed, world.clock.now())
    core.link_closed(agent_name("prefill-1", 1), "another secret", world.clock.now())
    left = {name: count for name, count in core.state.counters.items() if name.startswith("handoff_left")}
    assert left == {"handoff_left: job failed": 1, "handoff_left: link lost": 1}
