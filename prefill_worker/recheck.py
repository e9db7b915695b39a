"""A reader doubts blocks that were offered: what this worker says of them after looking again (DESIGN §4.8)."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from cluster.stubs.link_pb2 import JobFailed, OfferedBlock, Recheck, RecheckedBlock, RecheckResult
from engine.blocks import BlockBooks
from prefill_worker.jobs import Job


def vouch(
    books: BlockBooks,
    counters: Counter[str],
    recheck: Recheck,
    digests: list[bytes],
    offered: Mapping[int, OfferedBlock],
) -> tuple[RecheckResult, list[int]]:
    """Which of the blocks are still what was offered.

    One whose bytes changed leaves the prefix index, with all that was computed from it. These are returned as well:
    jobs may be building on them.

    `digests`: those of the blocks' bytes as they are now, of blocks within the pool alone, in order. `offered`: what
    the job has offered, by block; it is all that is known of one that is private, another of its key having been first.
    """
    found = iter(digests)
    answers = []
    doubted: list[int] = []
    for ref in recheck.blocks:
        current, corrupt = 0 <= ref.block < books.num_blocks, False
        if current:
            digest = next(found)
            current = books.is_kept(ref.block, ref.generation)
            private, known = offered.get(ref.block), None
            if books.is_published(ref.block):
                private, known = None, books.digest_of(ref.block)
            elif private is not None:
                known = private.digest
            if current and known is not None and known != digest:
                counters["block_corrupt"] += 1
                after = books.withdraw(ref.block) if private is None else books.withdraw_after(private.key)
                doubted += [ref.block, *after]
                current, corrupt = False, True
            else:
                counters["block_vouched_for" if current else "block_stale"] += 1
        told = RecheckedBlock(block=ref.block, generation=ref.generation, current=current, corrupt=corrupt)
        answers.append(told)
    return RecheckResult(attempt=recheck.attempt, blocks=answers), doubted


def distrusted(jobs: Iterable[Job], blocks: Collection[int]) -> list[tuple[Job, JobFailed]]:
    """Jobs that build on any of these blocks, and the word to their readers: from where on they must not believe us.

    One of the blocks has changed in memory, the others may be computed from it.
    """
    found = []
    for job in jobs:
        at = [i for i, block in enumerate(job.sequence.blocks) if block in blocks]
        if at:
            failed = JobFailed(attempt=job.message.attempt, reason="a block has changed in memory")
            failed.distrusted_from = at[0]
            found.append((job, failed))
    return found
