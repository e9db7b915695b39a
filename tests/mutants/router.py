"""Mutants of the router: following, ends, dispatcher, hearing, books, queue, and the text that clients see."""

from tests.mutants.mutant import Mutant

FOLLOW = "tests/unit/router_core/test_router_follow.py"
FAULT = "tests/unit/router_core/test_whose_fault.py"
FAILURES = "tests/unit/router_core/test_dispatcher_failures.py"
NOBODY = "tests/unit/router_core/test_nobody_left.py"
QUEUE = "tests/unit/router_core/test_router_queue.py"
STOPS = "tests/unit/router_front/test_stops.py"
TEXT = "tests/unit/router_front/test_text_fold.py"
TOOLS = "tests/unit/router_front/test_tool_folds.py"
BATCH = "tests/integration/test_http_batch.py"

MUTANTS = (
    Mutant(
        "count a cached prefix for a prompt whose log-probabilities are wanted",
        "router/follow.py",
        "usable = len(self.request.prompt) + len(history) if self.scored else self.next_scored",
        "usable = len(self.request.prompt) + len(history)",
        "tests/unit/router_core/test_router_follow.py"
        "::test_the_next_attempt_asks_for_the_rest_alone_and_keeps_the_weights",
    ),
    Mutant(
        "deliver what contradicts delivered tokens",
        "router/follow.py",
        "if list(ids[:known]) != sample.emitted[offset : offset + len(ids)]:",
        "if len(ids[:known]) != len(sample.emitted[offset : offset + len(ids)]):",
        f"{FOLLOW}::test_a_gap_or_contradiction_raises_and_changes_nothing",
    ),
    Mutant(
        "pass over a gap between tokens",
        "router/follow.py",
        "if offset < 0 or known < 0:",
        "if offset < 0:",
        f"{FOLLOW}::test_a_gap_or_contradiction_raises_and_changes_nothing",
    ),
    Mutant(
        "forget the last delivered token at a failover",
        "router/follow.py",
        "samples=[SampleState(emitted=s.emitted, finished=s.finished) for s in self.samples],",
        "samples=[SampleState(emitted=s.emitted[:-1], finished=s.finished) for s in self.samples],",
        f"{FOLLOW}::test_the_next_attempt_carries_what_was_delivered",
    ),
    Mutant(
        "skip the salt at the router",
        "router/follow.py",
        "chain = self._chains[slot] = KeyChain(root_key(shape.fingerprint, salt=self.request.salt), block_size)",
        "chain = self._chains[slot] = KeyChain(root_key(shape.fingerprint), block_size)",
        f"{FOLLOW}::test_a_prefix_hit_leaves_at_least_one_position",
    ),
    Mutant(
        "go on with other weights",
        "router/follow.py",
        "fingerprint=self.tries.fingerprint if self.begun else None,",
        "fingerprint=None,",
        f"{FAILURES}::test_other_weights_never_continue_a_stream",
    ),
    Mutant(
        "call a cut answer merely unavailable",
        "router/endings.py",
        "self.finish(follow, BrokenOff(why) if follow.begun else Unavailable(why), now)",
        "self.finish(follow, Unavailable(why), now)",
        f"{FAILURES}::test_after_the_first_token_a_failure_is_said_honestly",
    ),
    Mutant(
        "let a stream's patience run out while it still runs",
        "router/patience.py",
        "return [f for f in waiting if now - max(since, f.tries.waiting_since) >= self._with(f)]",
        "return [f for f in waiting if now - since >= self._with(f)]",
        f"{NOBODY}::test_a_stream_that_a_draining_worker_hands_over_has_all_its_patience",
    ),
    Mutant(
        "end a stream soon where a worker is left that is too small for it",
        "router/patience.py",
        "patience = self._with(follow) if self._its_weights_are_left(follow) else self._unavailable_s",
        "patience = self._unavailable_s",
        f"{NOBODY}::test_a_worker_that_is_too_small_for_it_is_as_good_as_none",
    ),
    Mutant(
        "excuse every silence, even of a request that gets nowhere",
        "router/endings.py",
        "excused = silent and follow.got > tries.got_at_loss",
        "excused = silent",
        "tests/unit/router_core/test_silences.py::test_so_is_one_that_gets_stuck_later",
    ),
    Mutant(
        "go back to the worker that failed",
        "router/endings.py",
        "tries.avoid.add(attempt.epoch)",
        "tries.avoid.discard(attempt.epoch)",
        f"{FAILURES}::test_what_a_worker_does_not_know_goes_on_at_another",
    ),
    Mutant(
        "never end for too many failures",
        "router/endings.py",
        "tries.failures += blamed and not excused",
        "tries.failures = int(blamed and not excused)",
        f"{FAILURES}::test_when_every_worker_fails_all_are_still_tried",
    ),
    Mutant(
        "keep the old epoch: a restarted worker still has its attempts",
        "router/dispatcher.py",
        "if worker.epoch != before:",
        "if not before:",
        f"{FAILURES}::test_another_epoch_on_the_same_address_is_another_peer",
    ),
    Mutant(
        "blame workers for the time in which the router slept",
        "router/dispatcher.py",
        "self._workers.forgive(gap, now)",
        "self._workers.forgive(0.0, now)",
        f"{FAILURES}::test_a_router_that_was_frozen_blames_nobody",
    ),
    Mutant(
        "count a client's error against the worker",
        "router/hearing.py",
        'how = {Blame.BLAME_REQUEST: "invalid", Blame.BLAME_DEADLINE: "deadline"}.get(message.blame, "failed")',
        'how = {Blame.BLAME_DEADLINE: "deadline"}.get(message.blame, "failed")',
        f"{FAILURES}::test_clients_errors_never_count_against_a_worker",
    ),
    Mutant(
        "count against each worker what no worker can run",
        "router/hearing.py",
        "follow.tries.could_not_run.append(worker.epoch)",
        "worker.health.failed(now)",
        f"{FAULT}::test_what_no_worker_can_run_ends_honestly_and_cools_nobody",
    ),
    Mutant(
        "forgive a worker what another one can run",
        "router/endings.py",
        "if worker.epoch in guilty:",
        "if not guilty:",
        f"{FAULT}::test_what_one_worker_could_not_run_counts_against_it_as_soon_as_another_runs_it",
    ),
    Mutant(
        "count a client's deadline against the worker that notices it",
        "router/hearing.py",
        'how = {Blame.BLAME_REQUEST: "invalid", Blame.BLAME_DEADLINE: "deadline"}.get(message.blame, "failed")',
        'how = {Blame.BLAME_REQUEST: "invalid"}.get(message.blame, "failed")',
        f"{FAULT}::test_a_deadline_that_passes_on_decode_first_costs_its_worker_nothing",
    ),
    Mutant(
        "let a worker speak of another's attempt",
        "router/hearing.py",
        "if follow is None or follow.attempt is None or follow.attempt.address != worker.address:",
        "if follow is None or follow.attempt is None:",
        f"{FAILURES}::test_a_worker_speaks_of_its_own_attempts_only",
    ),
    Mutant(
        "keep the booking of a prefill worker when an attempt is over",
        "router/books.py",
        "attempt.booked_prefill = None",
        "pass",
        f"{FAILURES}::test_a_prefill_worker_that_restarts_or_leaves_frees_its_bookings",
    ),
    Mutant(
        "let a wave of failovers hold up all that is new",
        "router/books.py",
        "return self.queue.scan(max(0, self._failovers_at_once - catching_up))",
        "return self.queue.scan()",
        f"{FAILURES}::test_a_wave_of_failovers_goes_first_but_not_all_at_once",
    ),
    Mutant(
        "let returning work wait behind new work",
        "router/queue.py",
        "entry.returning = returning",
        "entry.returning = False",
        f"{QUEUE}::test_who_comes_back_is_never_refused_and_returning_work_goes_first",
    ),
    Mutant(
        "off by one: a line of one more than its limit",
        "router/queue.py",
        "if waiting >= bounds.requests or (self._tokens and self._tokens + prompt_tokens > bounds.tokens):",
        "if waiting > bounds.requests or (self._tokens and self._tokens + prompt_tokens > bounds.tokens):",
        f"{QUEUE}::test_the_line_is_bounded_and_a_freed_place_is_free",
    ),
    Mutant(
        "show text that may become a stop string",
        "router/front/stops.py",
        "certain = len(buffer) - stops.depth[state]",
        "certain = len(buffer)",
        f"{STOPS}::test_cases_from_the_field",
    ),
    Mutant(
        "miss a stop string that ends inside another",
        "router/front/stops.py",
        "longest = self.match_length[self.fallback[child]]",
        "longest = 0",
        f"{STOPS}::test_cases_from_the_field",
    ),
    Mutant(
        "drop bytes that never became a character",
        "router/front/utf8.py",
        'text, _ = utf_8_decode(self._begun, "replace", True)',
        'text, _ = utf_8_decode(self._begun, "ignore", True)',
        f"{TEXT}::test_a_cut_in_mid_character_ends_the_same_in_stream_and_whole",
    ),
    Mutant(
        "drop bytes that are no text",
        "router/front/utf8.py",
        'text, used = utf_8_decode(data, "replace", False)',
        'text, used = utf_8_decode(data, "ignore", False)',
        f"{TEXT}::test_logprob_bytes_join_to_the_text_and_offsets_never_fall",
    ),
    Mutant(
        "swallow the incomplete character at the end",
        "router/front/utf8.py",
        'text, _ = utf_8_decode(self._begun, "replace", True)',
        'text, _ = utf_8_decode(self._begun, "replace", False)',
        f"{TEXT}::test_a_cut_in_mid_character_ends_the_same_in_stream_and_whole",
    ),
    Mutant(
        "off by one: a token beyond max_tokens in the text",
        "router/front/text.py",
        "elif self.completion_tokens >= rules.max_tokens:",
        "elif self.completion_tokens > rules.max_tokens:",
        f"{TEXT}::test_max_tokens_one",
    ),
    Mutant(
        "call a cut tool call complete",
        "router/front/text.py",
        'if step.finish == "stop" and self._calls.complete():',
        "if self._calls.complete():",
        f"{TEXT}::test_a_call_ends_with_its_own_reason_and_a_cut_one_with_length",
    ),
    Mutant(
        "lose what looked like a tool call",
        "router/front/tools/folds.py",
        "self._say(self._held)",
        'self._say("")',
        f"{TOOLS}::test_what_is_no_call_is_shown_to_the_last_character",
    ),
    Mutant(
        "end arguments at any brace",
        "router/front/tools/call_object.py",
        "if self._depth == 0:",
        "if self._depth >= 0:",
        f"{TOOLS}::test_arguments_come_back_as_they_were_written",
    ),
    Mutant(
        "give choices of a later prompt the index of the first",
        "router/front/batch.py",
        "self._front.open(request, self._call, part.ask, first=at * request.n)",
        "self._front.open(request, self._call, part.ask, first=0)",
        f"{BATCH}::test_every_choice_has_its_index",
    ),
    Mutant(
        "charge what was used with every try at a book whose answers are lost",
        "router/permits.py",
        "if not ended or not self.shared_up:  # what was used must not be charged again with every try",
        "if not ended:",
        "tests/unit/router_core/test_permits.py::test_what_was_used_is_not_charged_with_every_try",
    ),
    Mutant(
        "place what was pre-empted twice like anything else",
        "router/follow.py",
        "worst_case=self.tries.preemptions >= PREEMPTIONS_BEFORE_WORST_CASE,",
        "worst_case=False,",
        "tests/unit/router_core/test_dispatcher_failures.py::test_twice_preempted_work_waits_until_its_worst_case_fits",
    ),
)
