"""The simulation sees what it is there to see: one line made wrong, and some seed turns red."""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.quotas import LocalQuotas, Settlement, Take
from cluster.scores import Scores
from cluster.stubs.common_pb2 import PromptLogprobs
from cluster.stubs.link_pb2 import PrefillHello
from decode_worker.decoding import Decoding
from decode_worker.peers import Peer, Peers
from engine.blocks import BlockBooks
from engine.messages import DrawRules
from engine.prefix import keep_right_hits
from engine.rules import Fold, Matcher
from engine.sequence import Sequence
from kv_transfer.handoff import HandOff
from kv_transfer.staging import Staging
from prefill_worker.core import PrefillCore
from router.endings import Endings
from router.follow import Follow
from router.lanes import Entry, Lanes
from router.tenants import Tenant
from simulation.load import PATIENCE_S
from simulation.run import Simulation, simulate
from simulation.scenario import Scenario, Share, draw_scenario

REGRESSIONS = Path(__file__).parent / "regressions"
Patch = pytest.MonkeyPatch


def believe_every_copy(patch: Patch) -> None:
    real = HandOff.copy_done

    def copy_done(self: HandOff, read_id: int, digests: object) -> object:
        return real(self, read_id, [offer.digest for offer in self._reads[read_id].offers.values()])

    patch.setattr(HandOff, "copy_done", copy_done)


def reuse_slots_of_reads_that_were_given_up(patch: Patch) -> None:
    real = Staging.give_up

    def give_up(self: Staging, read_id: int) -> None:
        real(self, read_id)
        self._free.append(self._set_aside[read_id].slot)

    patch.setattr(Staging, "give_up", give_up)


def draw_otherwise_on_failover(patch: Patch) -> None:
    real = Follow.submit

    def submit(self: Follow, *arguments: object) -> object:
        message = real(self, *arguments)  # type: ignore[arg-type]
        message.sampling.seed += self.tries.number - 1
        return message

    patch.setattr(Follow, "submit", submit)


def leave_jobs_of_a_lost_link(patch: Patch) -> None:
    patch.setattr(PrefillCore, "link_closed", lambda self, link, now: None)


def lose_a_failed_attempt(patch: Patch) -> None:
    patch.setattr(Endings, "lose", lambda self, worker, why, now: None)


def never_check_prefix_hits(patch: Patch) -> None:
    patch.setattr("prefill_worker.core.keep_right_hits", lambda books, sequence, hits, digests: (hits, True, []))
    patch.setattr("decode_worker.admission.keep_right_hits", lambda books, sequence, hits, digests: (hits, True, []))


def end_one_token_early(patch: Patch) -> None:
    real = Decoding._end_reason

    def end_reason(self: Decoding, attempt: object, sample: object, token: int) -> str:
        early = len(sample.emitted) + 1 >= attempt.submit.max_tokens  # type: ignore[attr-defined]
        return real(self, attempt, sample, token) or ("length" if early else "")  # type: ignore[arg-type]

    patch.setattr(Decoding, "_end_reason", end_reason)


def no_help_for_reads_that_were_given_up(patch: Patch) -> None:
    patch.setattr(Peers, "help_to_end", lambda self, name, now: None)


def never_dial_again(patch: Patch) -> None:
    patch.setattr(Peers, "keep_up", lambda self, now: None)


def keep_links_to_another_life(patch: Patch) -> None:
    real = Peers.opened

    def opened(self: Peers, name: str, hello: PrefillHello) -> str | None:
        reason = real(self, name, hello)
        if reason is not None:
            self._state.effects.pop()
        return reason

    def by_agent(self: Peers, agent: str) -> Peer | None:
        return self._peers.get(agent)

    patch.setattr(Peers, "opened", opened)
    patch.setattr(Peers, "_by_agent", by_agent)


def doubt_who_has_a_rotten_block_anew(patch: Patch) -> None:
    """Blocks of the same number as the rotten ones, which had just become free."""

    def keep(books: BlockBooks, sequence: Sequence, hits: int, digests: list[bytes]) -> tuple[int, bool, list[int]]:
        before = sequence.blocks[:hits]
        right, room, doubted = keep_right_hits(books, sequence, hits, digests)
        return right, room, [*doubted, *set(before[right:]).intersection(sequence.blocks[right:hits])]

    patch.setattr("prefill_worker.core.keep_right_hits", keep)
    patch.setattr("decode_worker.admission.keep_right_hits", keep)


def forget_what_was_written_elsewhere(patch: Patch) -> None:
    """A fold that starts in mid-answer knows the prompt alone."""

    class Forgetful(Fold):
        def __init__(
            self,
            rules: DrawRules,
            history: list[int],
            *,
            vocab_size: int,
            eos_ids: tuple[int, ...],
            matcher: Matcher | None = None,
        ) -> None:
            prompt = history[: rules.prompt_tokens]
            super().__init__(rules, prompt, vocab_size=vocab_size, eos_ids=eos_ids, matcher=matcher)
            self._length = len(history)

    patch.setattr("engine.stepper.Fold", Forgetful)


def lose_what_a_failover_tells_of_the_prompt(patch: Patch) -> None:
    real = Follow.take_scores

    def take_scores(self: Follow, message: PromptLogprobs, vocab_size: int) -> Scores | None:
        told = real(self, message, vocab_size)
        return told if self.tries.number == 1 else None

    patch.setattr(Follow, "take_scores", take_scores)


def keep_every_permit(patch: Patch) -> None:
    def settle_now(self: LocalQuotas, settlements: Mapping[str, Settlement]) -> None:
        pass

    patch.setattr(LocalQuotas, "settle_now", settle_now)


def let_everybody_in(patch: Patch) -> None:
    def would_refuse(self: LocalQuotas, take: Take) -> None:
        pass

    patch.setattr(LocalQuotas, "would_refuse", would_refuse)


def serve_tenants_by_name(patch: Patch) -> None:
    """In worlds where one that asks little and may have much waits among many requests of another."""

    def in_order(self: Lanes) -> Iterator[Entry]:
        yield from self.returning
        for tenant in sorted(self._waiting()):
            yield from self.of(tenant).in_order()

    def draw(rng: random.Random, *, faults: bool = True) -> Scenario:
        drawn = draw_scenario(rng, faults=False)
        shares = Share(Tenant("a"), 0.5, asks=6.0), Share(Tenant("b"), 4.0, asks=1.0)
        router = drawn.config.router.model_copy(update={"queue_limit": 64})
        return replace(
            drawn,
            shares=shares,
            requests=120,
            span_s=5.0,
            step_s=0.03,
            token_s=0.002,
            rules=0.0,
            config=drawn.config.model_copy(update={"router": router}),
        )

    patch.setattr(Lanes, "in_order", in_order)
    patch.setattr("simulation.run.draw_scenario", draw)


def deep_lines(patch: Patch) -> None:
    """Worlds without faults in which many ask at once; in some the last one waits for longer than I7 has patience."""

    def draw(rng: random.Random, *, faults: bool = True) -> Scenario:
        drawn = draw_scenario(rng, faults=False)
        router = drawn.config.router.model_copy(update={"queue_limit": 64})
        engine = drawn.config.engine.model_copy(update={"max_batch": 2})
        config = drawn.config.model_copy(update={"router": router, "engine": engine})
        return replace(drawn, shares=(), requests=30, span_s=1.0, step_s=0.45, token_s=0.002, rules=0.0, config=config)

    patch.setattr("simulation.run.draw_scenario", draw)


def serve_the_youngest_first(patch: Patch) -> None:
    patch.setattr(Entry, "order", property(lambda self: (self.priority, -self.arrival)))
    deep_lines(patch)


def among(patch: Patch, *kinds: str) -> None:
    """Worlds as they are drawn, but with these faults, and often."""

    def draw(rng: random.Random, *, faults: bool = True) -> Scenario:
        return replace(draw_scenario(rng, faults=faults), faults=kinds, fault_every=20.0)

    patch.setattr("simulation.run.draw_scenario", draw)


MUTANTS: list[Callable[[Patch], None]] = [
    believe_every_copy,
    reuse_slots_of_reads_that_were_given_up,
    draw_otherwise_on_failover,
    leave_jobs_of_a_lost_link,
    lose_a_failed_attempt,
    never_check_prefix_hits,
    end_one_token_early,
    forget_what_was_written_elsewhere,
    lose_what_a_failover_tells_of_the_prompt,
    keep_every_permit,
    let_everybody_in,
    serve_tenants_by_name,
    serve_the_youngest_first,
]


MET_BY = {never_check_prefix_hits: ("rot",)}  # by few of the worlds that are drawn

FOUND_BY_SIMULATION: list[tuple[Callable[[Patch], None], str]] = [
    (no_help_for_reads_that_were_given_up, "given_up_read_never_ends"),
    (never_dial_again, "lost_link_is_not_dialled_again"),
    (keep_links_to_another_life, "link_to_a_later_life_stays_open"),
    (doubt_who_has_a_rotten_block_anew, "replaced_block_is_not_doubted"),
]


@pytest.mark.parametrize(("mutant", "file"), FOUND_BY_SIMULATION, ids=lambda part: getattr(part, "__name__", ""))
def test_a_bug_that_was_found_is_found_again(mutant: Callable[[Patch], None], file: str, monkeypatch: Patch) -> None:
    """In worlds with the faults that it took, from a seed on where it did not take long."""
    mutant(monkeypatch)
    found = json.loads((REGRESSIONS / f"{file}.json").read_text())
    among(monkeypatch, *found["faults"])
    first = found.get("from", 0)
    assert any(simulate(seed).violation for seed in range(first, first + 60))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_fault_in_the_product_turns_a_seed_red(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    if mutant in MET_BY:
        among(monkeypatch, *MET_BY[mutant])
    for seed in range(60):
        if simulate(seed).violation:
            return
    pytest.fail("60 seeds found nothing wrong")


def test_to_wait_for_long_behind_others_is_no_standstill(monkeypatch: Patch) -> None:
    deep_lines(monkeypatch)
    for seed in range(20):
        simulation = Simulation(seed)
        verdict = simulation.run()
        assert not verdict.violation, verdict.line()
        waited = [client.trace.timings_ms.get("queue", 0.0) / 1000 for client in simulation.load.clients]
        if max(waited) > PATIENCE_S:
            return
    pytest.fail("nobody had to wait for so long")
