"""The simulation sees what it is there to see: one line made wrong, and some seed turns red."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.stubs.link_pb2 import PrefillHello
from decode_worker.decoding import Decoding
from decode_worker.peers import Peer, Peers
from kv_transfer.handoff import HandOff
from kv_transfer.staging import Staging
from prefill_worker.core import PrefillCore
from router.endings import Endings
from router.follow import Follow
from simulation.run import simulate
from simulation.scenario import Scenario, draw_scenario

REGRESSIONS = Path(__file__).parent / "regressions"
Patch = pytest.MonkeyPatch


def believe_every_copy(patch: Patch) -> None:
    real = HandOff.copy_done

    def copy_done(self: HandOff, read_id: int, digests: object) -> object:
        return real(self, read_id, [self._offered[i].digest for i in self._reads[read_id]])

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
    patch.setattr("prefill_worker.core.keep_right_hits", lambda books, sequence, hits, digests: hits)
    patch.setattr("decode_worker.admission.keep_right_hits", lambda books, sequence, hits, digests: hits)


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
]


MET_BY = {never_check_prefix_hits: ("rot",)}  # by few of the worlds that are drawn

FOUND_BY_SIMULATION: list[tuple[Callable[[Patch], None], str]] = [
    (no_help_for_reads_that_were_given_up, "given_up_read_never_ends"),
    (never_dial_again, "lost_link_is_not_dialled_again"),
    (keep_links_to_another_life, "link_to_a_later_life_stays_open"),
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
