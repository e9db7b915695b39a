"""Mutants of the engine: pages, blocks, prefix, sequences, scheduler, batcher, sampler, noise, stepper, process."""

from tests.mutants.mutant import Mutant

BLOCKS = "tests/unit/engine/test_blocks.py"
SCHEDULER = "tests/unit/engine/test_scheduler.py"
SAMPLER = "tests/unit/engine_process/test_sampler.py"
RULES = "tests/unit/workers/test_rules_on_every_path.py"
MATRIX = "tests/unit/workers/test_tracer_matrix.py"
SCORER = "tests/unit/engine_process/test_scorer.py"

MUTANTS = (
    Mutant(
        "use a cached prefix for a prompt whose log-probabilities are wanted",
        "engine/scoring.py",
        "most = min(most, scoring.next - 1)",
        "most = min(most, scoring.end - 1)",
        f"{SCORER}::test_what_is_told_already_lets_a_prefix_be_used",
    ),
    Mutant(
        "rank a prompt's token before all that are as likely",
        "engine/sampler.py",
        "before = np.count_nonzero(logits_V > own) + np.count_nonzero(logits_V[:token] == own)",
        "before = np.count_nonzero(logits_V > own)",
        f"{SCORER}::test_against_a_plain_sort",
    ),
    Mutant(
        "ask for no huge pages",
        "engine/pages.py",
        "memory.madvise(mmap.MADV_HUGEPAGE)",
        "pass",
        "tests/unit/engine/test_pages.py::test_huge_pages_are_asked_for_where_one_is_filled",
    ),
    Mutant(
        "free a block before the plan came back",
        "engine/blocks.py",
        "elif self._sent > self._back:",
        "elif self._sent < self._back:",
        f"{BLOCKS}::test_a_block_freed_in_mid_plan_waits_for_the_plan",
    ),
    Mutant(
        "evict a cached block that a plan in flight may read",
        "engine/blocks.py",
        "if plan <= self._back:",
        "if plan <= self._sent:",
        f"{BLOCKS}::test_a_cached_block_freed_in_mid_plan_is_matched_but_not_evicted_before_the_plan_is_back",
    ),
    Mutant(
        "believe a report about a block's former life",
        "engine/blocks.py",
        "if self._generation[block] != generation or not self._owners[block]:",
        "if not self._owners[block]:",
        f"{BLOCKS}::test_a_late_report_about_a_former_life_is_ignored",
    ),
    Mutant(
        "let the last publisher of a key win",
        "engine/blocks.py",
        "if key in self._index or block in self._published:",
        "if block in self._published:",
        f"{BLOCKS}::test_the_first_publisher_of_a_key_wins",
    ),
    Mutant(
        "evict the head of a chain first",
        "engine/blocks.py",
        "for block in reversed(blocks):",
        "for block in blocks:",
        f"{BLOCKS}::test_eviction_takes_the_tail_of_the_oldest_chain_first",
    ),
    Mutant(
        "use prefix hits without digesting them again",
        "engine/prefix.py",
        "while right < hits and books.is_published(blocks[right])"
        " and digests[right] == books.digest_of(blocks[right]):",
        "while right < hits and books.is_published(blocks[right]):",
        "tests/unit/workers/test_faults.py::test_a_prefix_block_that_rots_is_noticed_before_use",
    ),
    Mutant(
        "off by one: no block for the last positions",
        "engine/sequence.py",
        "missing = -(-positions // block_size) - len(self.blocks)",
        "missing = positions // block_size - len(self.blocks)",
        f"{MATRIX}::test_every_length_and_chunk[local-17-64-greedy]",
    ),
    Mutant(
        "let every stream into one step",
        "engine/scheduler.py",
        "chosen = [(s, 1) for s in decoding[: budget.max_batch]]",
        "chosen = [(s, 1) for s in decoding]",
        f"{SCHEDULER}::test_more_streams_than_the_batch_takes_turn_about",
    ),
    Mutant(
        "let readers take the whole step from streams",
        "engine/scheduler.py",
        "left = min(left, budget.local_tokens)",
        "left = max(left, budget.local_tokens)",
        f"{SCHEDULER}::test_readers_beside_streams_get_at_most_the_local_share",
    ),
    Mutant(
        "keep a long prompt waiting for ever",
        "engine/scheduler.py",
        "kept = min(oldest.remaining, -(-left // 4))  # for the oldest, until it has its share",
        "kept = 0",
        f"{SCHEDULER}::test_a_long_prompt_is_not_passed_over_for_ever",
    ),
    Mutant(
        "let streams alone fill the step, for as long as there are so many",
        "engine/scheduler.py",
        "left = max(budget.chunk_tokens - len(chosen), budget.least_tokens)",
        "left = budget.chunk_tokens - len(chosen)",
        f"{SCHEDULER}::test_a_reader_goes_on_beside_streams_that_fill_a_chunk_alone",
    ),
    Mutant(
        "refuse as the client's fault what this engine cannot run",
        "engine/stepper.py",
        'errors[index] = RowError(f"{type(error).__name__}: {error}")',
        'errors[index] = RowError(f"{type(error).__name__}: {error}", refused=True)',
        "tests/unit/workers/test_whose_fault.py::"
        "test_what_one_prefill_worker_cannot_run_is_left_to_the_next_and_counts_against_it",
    ),
    Mutant(
        "draw a token after every chunk of a prompt",
        "engine/batcher.py",
        "samples = sequence.draws if end == len(sequence.tokens) else []",
        "samples = sequence.draws",
        f"{MATRIX}::test_every_length_and_chunk[local-65-16-greedy]",
    ),
    Mutant(
        "write again over KV that is there already",
        "engine/batcher.py",
        "write = sequence.computed < len(sequence.tokens)",
        "write = sequence.computed <= len(sequence.tokens)",
        f"{MATRIX}::test_a_complete_prompt_whose_first_token_never_came[1-64]",
    ),
    Mutant(
        "give results to a sequence that was removed in mid-plan",
        "engine/batcher.py",
        "if sequence.id not in self.sequences:",
        "if sequence.id in self._drop and not sequence.tokens:",
        "tests/unit/workers/test_fault_points.py::test_cancelled_in_mid_step_and_asked_again_into_a_pool_of_that_size",
    ),
    Mutant(
        "leave out the token that crosses top-p",
        "engine/sampler.py",
        "return kept_n[: int(np.searchsorted(np.cumsum(weights_n), mass)) + 1]",
        "return kept_n[: max(1, int(np.searchsorted(np.cumsum(weights_n), mass)))]",
        f"{SAMPLER}::test_top_p_draws_from_the_renormalised_nucleus",
    ),
    Mutant(
        "take log-probabilities from the most likely token",
        "engine/sampler.py",
        "results.append(Sampled(token, float(logits_V[token]) - raw_norm, top))",
        "results.append(Sampled(token, float(logits_V[best]) - raw_norm, top))",
        f"{SAMPLER}::test_logprobs_are_those_of_the_raw_distribution",
    ),
    Mutant(
        "draw the same for every sample of a request",
        "engine/noise.py",
        "key = mix((key ^ index) + GOLDEN)",
        "key = mix(key + GOLDEN)",
        f"{SAMPLER}::test_seed_index_and_position_each_matter",
    ),
    Mutant(
        "begin a fold behind its history",
        "engine/rules.py",
        "self.follow(rules.prompt_tokens, history[rules.prompt_tokens :])",
        "self._length = len(history)",
        f"{RULES}::test_grammar_and_penalties_go_on_from_history[split-1-schema]",
    ),
    Mutant(
        "count what was written once more when it is run again",
        "engine/rules.py",
        "new = tokens[self._length - start :]",
        "new = tokens",
        "tests/unit/engine_process/test_rules.py::test_equals_the_definition_wherever_the_fold_begins",
    ),
    Mutant(
        "off by one: draw with the noise of the position before",
        "engine/stepper.py",
        "drawn = sample_row(logits[index], row.samples, row.start + len(forwards[index].tokens), shaped)",
        "drawn = sample_row(logits[index], row.samples, row.start + len(forwards[index].tokens) - 1, shaped)",
        f"{MATRIX}::test_every_length_and_chunk[split-17-64-seeded]",
    ),
    Mutant(
        "digest the staging instead of the copy",
        "engine/pool.py",
        "return self.digests(blocks)",
        "size = self.layout.block_bytes; return ["
        "digest_block(self.staging[slot, at * size : (at + 1) * size], self.layout.kv_heads)"
        " for at in range(len(blocks))]",
        "tests/unit/engine_process/test_process.py::test_the_digest_is_of_the_copy_whatever_lands_in_the_slot_after_it",
    ),
    Mutant(
        "take who has a rotten block anew for one that builds on it",
        "engine/prefix.py",
        "return right, fresh is not None, [block for block in doubted if block not in (fresh or [])]",
        "return right, fresh is not None, doubted",
        "tests/unit/engine/test_prefix.py::test_a_rotten_block_that_is_free_at_once_is_doubted_in_nobodys_hands",
    ),
    Mutant(
        "hand out blocks that were freed in mid-plan",
        "engine/blocks.py",
        "elif self._sent > self._back:",
        "elif False:",
        "tests/unit/workers/test_fault_points.py::test_cancelled_in_mid_step_and_asked_again_into_a_pool_of_that_size",
    ),
)
