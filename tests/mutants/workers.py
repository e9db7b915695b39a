"""Mutants of the decode and the prefill worker's brains."""

from tests.mutants.mutant import Mutant

FAULTS = "tests/unit/workers/test_faults.py"
SESSIONS = "tests/unit/workers/test_sessions.py"
MATRIX = "tests/unit/workers/test_tracer_matrix.py"
LINKS = "tests/unit/workers/test_links.py"
PREFIX = "tests/unit/workers/test_prefix_index.py"
KV = "tests/parity/test_kv_int8.py"
ROOM = "tests/unit/workers/test_room.py"

MUTANTS = (
    Mutant(
        "publish before compare: under the digest that was offered",
        "decode_worker/handoffs.py",
        "self._state.to_engine(Copy(report.id, slot, blocks, transfer.holders[report.id].source))",
        "self._state.to_engine(Copy(report.id, slot, blocks)); [self._state.books.publish(block, "
        "self._state.books.generation(block), transfer.handoff.keys, at, transfer.handoff._offered[at].digest)"
        " for at, block in zip(indexes, blocks)]",
        f"{PREFIX}::test_nothing_is_in_the_prefix_index_that_was_not_proved",
    ),
    Mutant(
        "let a holder that was left answer for its successor",
        "decode_worker/handoffs.py",
        "return transfer if transfer is not None and transfer.peer is peer else None",
        "return transfer",
        f"{FAULTS}::test_messages_of_strangers_and_of_the_past_are_ignored",
    ),
    Mutant(
        "do not tell the holder of a cancel",
        "decode_worker/handoffs.py",
        "self._leave_holder(transfer, cancel=True)",
        "self._leave_holder(transfer, cancel=False)",
        f"{ROOM}::test_a_cancel_reaches_the_prefill_worker_at_once",
    ),
    Mutant(
        "keep the old epoch: take a restarted worker for the one that was dialled",
        "decode_worker/peers.py",
        "if theirs.epoch != peer.address.epoch:",
        "if not theirs.epoch:",
        "tests/unit/workers/test_hostile_peers.py::test_prefill_workers_that_are_not_who_they_should_be[another epoch]",
    ),
    Mutant(
        "pair workers of different weights",
        "decode_worker/peers.py",
        "if expected != theirs.fingerprint:",
        "if not theirs.fingerprint:",
        f"{LINKS}::test_a_life_that_does_not_fit_is_remembered_while_it_is_a_member_and_not_dialled_again",
    ),
    Mutant(
        "take a source at its word",
        "decode_worker/peers.py",
        "expected = ours.sources[source] if source else ours.fingerprint",
        "expected = theirs.fingerprint if source else ours.fingerprint",
        f"{KV}::test_what_is_not_converted_does_not_pair",
    ),
    Mutant(
        "skip the salt on the decode worker",
        "decode_worker/admission.py",
        "chain = KeyChain(root_key(state.facts.identity.fingerprint, salt=attempt.submit.salt), size)",
        "chain = KeyChain(root_key(state.facts.identity.fingerprint), size)",
        f"{PREFIX}::test_a_tenants_prefix_is_no_hit_for_another[local]",
    ),
    Mutant(
        "skip the salt on the prefill worker",
        "prefill_worker/core.py",
        "chain = KeyChain(root_key(self._hello.identity.fingerprint, salt=message.salt), size)",
        "chain = KeyChain(root_key(self._hello.identity.fingerprint), size)",
        f"{PREFIX}::test_a_tenants_prefix_is_no_hit_for_another[split]",
    ),
    Mutant(
        "let newcomers pass those who wait for room",
        "decode_worker/admission.py",
        "overtakes = any(w.arrival < attempt.arrival for w in waiting)",
        "overtakes = False",
        f"{ROOM}::test_who_waits_for_room_is_not_passed_by_a_smaller_newcomer",
    ),
    Mutant(
        "off by one: offset + 1 after a failover's history",
        "decode_worker/sessions.py",
        "session.outbox.add(sample.run(attempt.id, len(sample.emitted) - 1))",
        "session.outbox.add(sample.run(attempt.id, len(sample.emitted)))",
        f"{MATRIX}::test_going_on_from_history[1-split-5-64]",
    ),
    Mutant(
        "off by one: a token beyond max_tokens",
        "decode_worker/decoding.py",
        "if len(sample.emitted) >= submit.max_tokens or len(submit.prompt) + len(sample.emitted) >= facts.max_context:",
        "if len(sample.emitted) > submit.max_tokens or len(submit.prompt) + len(sample.emitted) >= facts.max_context:",
        f"{MATRIX}::test_every_length_and_chunk[local-17-64-greedy]",
    ),
    Mutant(
        "go on without what was emitted before",
        "decode_worker/decoding.py",
        "prompt.tokens = list(attempt.submit.prompt) + sample.emitted",
        "prompt.tokens = list(attempt.submit.prompt)",
        f"{MATRIX}::test_going_on_from_history[1-split-5-64]",
    ),
    Mutant(
        "pre-empt the oldest",
        "decode_worker/decoding.py",
        "victim = max(victims, key=lambda a: (a.arrival, a.id))",
        "victim = min(victims, key=lambda a: (a.arrival, a.id))",
        f"{ROOM}::test_the_youngest_is_pre_empted_and_never_one_that_is_protected",
    ),
    Mutant(
        "pre-empt what is protected",
        "decode_worker/decoding.py",
        "victims = [a for a in holding if not a.protected]",
        "victims = list(holding)",
        f"{ROOM}::test_the_youngest_is_pre_empted_and_never_one_that_is_protected",
    ),
    Mutant(
        "never open a breaker",
        "decode_worker/breaker.py",
        "self.failures += 1",
        "self.failures = 1",
        "tests/unit/workers/test_breaker.py::test_a_wire_that_is_broken_is_not_tried_by_every_request",
    ),
    Mutant(
        "off by one: offset + 1 on resume",
        "decode_worker/sessions.py",
        "session.outbox.add(sample.run(attempt.id, offset))",
        "session.outbox.add(sample.run(attempt.id, offset + 1))",
        f"{SESSIONS}::test_an_attempt_goes_on_where_its_router_stands[meanwhile-9]",
    ),
    Mutant(
        "listen to an older session of the same router",
        "decode_worker/sessions.py",
        "if router is not None and hello.session <= router.number:",
        "if router is not None and hello.session < 0:",
        f"{SESSIONS}::test_the_session_with_the_highest_number_is_spoken_with",
    ),
    Mutant(
        "keep attempts that their router does not name",
        "decode_worker/core.py",
        "for attempt in [a for a in self._attempts_of(hello.epoch) if a.id not in wanted]:",
        "for attempt in [a for a in self._attempts_of(hello.epoch) if a.id in ()]:",
        f"{SESSIONS}::test_what_the_router_does_not_name_is_cancelled",
    ),
    Mutant(
        "resume the attempt of another router",
        "decode_worker/core.py",
        "return attempt if attempt is not None and attempt.router == router else None",
        "return attempt",
        f"{SESSIONS}::test_a_router_cannot_resume_the_attempt_of_another",
    ),
    Mutant(
        "cancel nothing of a router that never came back",
        "decode_worker/sessions.py",
        "gone = [r.epoch for r in self._routers.values() if r.session is None and now - r.broken_at > patience_s]",
        "gone: list[int] = []",
        f"{SESSIONS}::test_without_a_router_attempts_are_cancelled_in_time",
    ),
    Mutant(
        "keep an end for the next interval",
        "decode_worker/outbox.py",
        "self._urgent = self._urgent or run.offset == 0 or bool(run.end)",
        "self._urgent = self._urgent or run.offset == 0",
        "tests/unit/workers/test_outbox.py::test_an_end_leaves_at_once_with_the_tokens_before_it",
    ),
    Mutant(
        "off by one: offer blocks one position further on",
        "prefill_worker/core.py",
        "offer = Offer(attempt=job.message.attempt, first_position=start * self.block_size, blocks=blocks, last=last)",
        "offer = Offer(attempt=job.message.attempt, first_position=start * self.block_size + 1, blocks=blocks)",
        f"{MATRIX}::test_every_length_and_chunk[split-65-64-greedy]",
    ),
    Mutant(
        "vouch for a block that has another life",
        "prefill_worker/recheck.py",
        "current = books.is_kept(ref.block, ref.generation)",
        "current = True",
        f"{PREFIX}::test_a_holder_vouches_for_nothing_that_has_another_life",
    ),
    Mutant(
        "keep a rotten block in the prefix index",
        "prefill_worker/recheck.py",
        "after = books.withdraw(ref.block) if private is None else books.withdraw_after(private.key)",
        "after = [] if private is None else books.withdraw_after(private.key)",
        f"{PREFIX}::test_a_block_that_rotted_leaves_the_holders_prefix_index",
    ),
    Mutant(
        "let offered blocks go as soon as the prompt is read",
        "prefill_worker/core.py",
        "job.pinned_until = now + self._config.handoff.pin_s",
        "job.pinned_until = now",
        f"{PREFIX}::test_offered_blocks_stay_until_they_are_taken_or_for_a_while",
    ),
    Mutant(
        "stop helping readers that asked for it",
        "prefill_worker/readers.py",
        "serving = serving or any(now < until for until in self._until.values())",
        "serving = serving or any(now > until for until in self._until.values())",
        "tests/unit/workers/test_reads_that_hang.py::test_help_lasts_a_while_and_ends_with_the_link",
    ),
    Mutant(
        "let a stuck write keep a stream that was cut",
        "cluster/streams.py",
        "cutting = asyncio.ensure_future(self._cut.wait())",
        "cutting = asyncio.ensure_future(asyncio.Event().wait())",
        "tests/unit/workers/test_faulty_streams.py::test_a_cut_stream_ends_while_a_write_is_stuck",
    ),
    Mutant(
        "let a hand-off that read nothing close a breaker that reads opened",
        "decode_worker/handoffs.py",
        "if transfer.has_read:",
        "if True:",
        "tests/unit/workers/test_breaker.py::test_a_hand_off_that_reads_nothing_says_nothing_of_the_wire",
    ),
    Mutant(
        "take blocks from those who decode alone",
        "decode_worker/decoding.py",
        "victims = [a for a in holding if not a.protected]",
        "victims = [a for a in holding if not a.protected and a.phase is Phase.DECODING]",
        "tests/unit/workers/test_faults_resources.py::test_the_youngest_gives_way_while_it_is_being_handed_over",
    ),
    Mutant(
        "leave jobs without a word when draining has lasted too long",
        "prefill_worker/core.py",
        'self._fail(job, "draining", Blame.BLAME_WORKER)',
        'self._leave(job, "failed")',
        "tests/unit/workers/test_drain.py::test_a_prefill_worker_that_gives_up_a_job_says_so",
    ),
)
