"""Mutants of keys and digests (cluster/core) and of hand-offs, staging and transports (kv_transfer)."""

from tests.mutants.mutant import Mutant

KEYS = "tests/unit/core/test_keys.py"
DIGEST = "tests/unit/core/test_digest.py"
HANDOFF = "tests/unit/kv_transfer/test_handoff.py"
STAGING = "tests/unit/kv_transfer/test_staging.py"

MUTANTS = (
    Mutant(
        "skip the salt in every key",
        "cluster/core/keys.py",
        "for part in (fingerprint, adapter.encode(), salt):",
        "for part in (fingerprint, adapter.encode()):",
        f"{KEYS}::test_fields_cannot_be_confused",
    ),
    Mutant(
        "join the fields of a key without their lengths",
        "cluster/core/keys.py",
        'digest.update(struct.pack("<Q", len(part)))',
        'digest.update(b"")',
        f"{KEYS}::test_fields_cannot_be_confused",
    ),
    Mutant(
        "name a block without what comes before it",
        "cluster/core/keys.py",
        "parent = self.keys[-1] if self.keys else self._root",
        "parent = self._root",
        f"{KEYS}::test_one_other_token_changes_every_key_from_there_on",
    ),
    Mutant(
        "digest words wherever they stand",
        "cluster/core/digest.py",
        "mixed *= weights(words.shape[1])",
        "mixed *= weights(1)",
        f"{DIGEST}::test_golden_values",
    ),
    Mutant(
        "digest a block as one head",
        "cluster/core/digest.py",
        'return digest_units(block.reshape(heads, -1)).astype("<u8").tobytes()',
        'return digest_units(block.reshape(1, -1)).astype("<u8").tobytes()',
        f"{DIGEST}::test_swapped_heads_change_it",
    ),
    Mutant(
        "believe a copy without comparing its digest",
        "kv_transfer/handoff.py",
        "if digest == offered.digest and index < read.distrusted:",
        "if index < read.distrusted:",
        f"{HANDOFF}::test_wrong_bytes_wait_for_the_holders_word_and_are_read_once_more",
    ),
    Mutant(
        "ignore the key of an offered block",
        "kv_transfer/handoff.py",
        "if block.key != (keys or self.keys)[index]:",
        "if not block.key:",
        f"{HANDOFF}::test_a_key_of_other_content_is_refused_whatever_its_digest",
    ),
    Mutant(
        "keep a converted block under the digest it came with",
        "kv_transfer/handoff.py",
        "verified.append(Verified(index, self.keys[index], own))",
        "verified.append(Verified(index, self.keys[index], digest))",
        f"{HANDOFF}::test_a_holder_may_have_names_of_its_own_and_what_came_may_be_kept_as_something_else",
    ),
    Mutant(
        "off by one: a range of one block too many",
        "kv_transfer/handoff.py",
        "if ready and len(run) < limit:",
        "if ready and len(run) <= limit:",
        f"{HANDOFF}::test_a_range_is_a_run_of_neighbours_from_what_is_wanted",
    ),
    Mutant(
        "read a doubted block before its holder has vouched",
        "kv_transfer/handoff.py",
        "self._doubted.add(index)",
        "self._doubted.discard(index)",
        f"{HANDOFF}::test_wrong_bytes_wait_for_the_holders_word_and_are_read_once_more",
    ),
    Mutant(
        "take the word for another generation as the word for this one",
        "kv_transfer/handoff.py",
        "if (offered.block, offered.generation) != (block, generation):",
        "if offered.block != block:",
        f"{HANDOFF}::test_an_answer_about_another_generation_is_ignored",
    ),
    Mutant(
        "read the offers of a holder that was left",
        "kv_transfer/handoff.py",
        "self._offered.clear()",
        "pass",
        f"{HANDOFF}::test_leaving_a_holder_keeps_what_is_verified_and_waits_for_copies",
    ),
    Mutant(
        "free the slot of a read that was given up",
        "kv_transfer/staging.py",
        "self._set_aside[read_id] = self._reading.pop(read_id)",
        "self._free.append(self._reading.pop(read_id).slot)",
        f"{STAGING}::test_a_read_that_was_given_up_keeps_its_slot_until_it_ends",
    ),
    Mutant(
        "let one peer have every slot",
        "kv_transfer/staging.py",
        "if from_peer >= self._per_peer or self.in_use >= self.active or not self._free:",
        "if self.in_use >= self.active or not self._free:",
        f"{STAGING}::test_one_peer_gets_a_quarter_of_the_slots",
    ),
    Mutant(
        "off by one: join blocks that only nearly touch",
        "kv_transfer/ranges.py",
        "if ranges and sum(ranges[-1]) == address:",
        "if ranges and sum(ranges[-1]) <= address:",
        "tests/unit/kv_transfer/test_ranges.py::test_only_neighbours_in_memory_and_in_order_are_joined",
    ),
    Mutant(
        "NotFound frees the slot: forget a peer with a read in progress",
        "kv_transfer/transports/nixl.py",
        "for peer in self._loaded - self._peers.keys() - {posted.peer for posted in self._posted}:",
        "for peer in self._loaded - self._peers.keys():",
        "tests/contract/test_transport.py::test_a_read_outlives_the_drop_of_its_peer[tcp]",
    ),
    Mutant(
        "let blocks go while something is still copied into them",
        "decode_worker/handoffs.py",
        "self._copying[report.id] = blocks",
        "self._copying[report.id] = self._state.books.release(blocks, copy_owner(report.id)) or []",
        "tests/unit/workers/test_faults.py::test_a_copy_under_way_keeps_its_blocks_through_a_cancel",
    ),
    Mutant(
        "give the slots of reads that were given up to nobody, until something else happens",
        "decode_worker/handoffs.py",
        "self._post_reads(now)  # reads that were given up leave room for others",
        "pass",
        "tests/unit/workers/test_reads_that_hang.py::test_who_waits_for_a_slot_gets_it_when_a_read_is_given_up",
    ),
)
