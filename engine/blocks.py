"""Block books: who owns which block, what it holds, and when it may be written again (I2).

A block's life:
    1. free       nobody's; content meaningless
    2. owned      one or more owners (sequences, offers, copies); only an unpublished block is ever written
    3. published  its key is in the prefix index with the digest of its bytes; never written again
    4. cached     published and without owner: still matched, evicted least recently used first
    5. draining   unowned and unpublished, but a plan in flight may still touch it: free once that plan is back
Every allocation of a block raises its generation, so that a late report about its former life is recognised.
Routers are told of the *routing blocks* alone: every k-th block of a chain, whose key names the whole prefix before it.
Pure bookkeeping: no memory, no clock.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cluster.core.errors import IntegrityError
from cluster.core.keys import BlockKey

Owner = str


class Published(NamedTuple):
    """What a block was entered with: `depth` blocks of its chain come before it, the last of them named `parent`."""

    key: BlockKey
    digest: bytes
    parent: BlockKey | None
    depth: int


class BlockBooks:
    """The books of one worker's pool of `num_blocks` blocks; every `routing_stride`-th of a chain is for routing."""

    def __init__(self, num_blocks: int, routing_stride: int = 1) -> None:
        self.num_blocks = num_blocks
        self.routing_stride = routing_stride
        self._generation = [0] * num_blocks
        self._owners: list[set[Owner]] = [set() for _ in range(num_blocks)]
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, int] = OrderedDict()  # block -> newest plan sent when it lost its last owner
        self._draining: deque[tuple[int, int]] = deque()  # (plan, block), plans ascending
        self._published: dict[int, Published] = {}
        self._index: dict[BlockKey, int] = {}
        self._sent = 0
        self._back = 0
        self._routing: dict[BlockKey, None] = {}  # the routing blocks in the prefix index
        self._news: dict[BlockKey, bool] = {}  # those that came (True) or went since `take_events`, as they are now
        self.recycled: list[int] = []

    # -- plans in flight ------------------------------------------------------------------------------------------

    def plan_sent(self, plan: int) -> None:
        """A plan that may touch any owned block left for the engine."""
        self._sent = plan

    def plan_back(self, plan: int) -> None:
        """Every rank has returned `plan`: what was freed before it was sent is free now."""
        self._back = plan
        while self._draining and self._draining[0][0] <= plan:
            self._recycle(self._draining.popleft()[1])

    # -- owning ---------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        fenced = 0
        for plan in reversed(self._cached.values()):
            if plan <= self._back:
                break
            fenced += 1
        return len(self._free) + len(self._cached) - fenced

    @property
    def in_use(self) -> int:
        """Blocks that have an owner or wait for a plan."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks without an owner that are matched until they are evicted."""
        return len(self._cached)

    def generation(self, block: int) -> int:
        return self._generation[block]

    def allocate(self, count: int, owner: Owner) -> list[int] | None:
        """Give `owner` `count` writable blocks, or None (and nothing changes) when there are not enough."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block, _plan = self._cached.popitem(last=False)
                self._unpublish(block)
                self.recycled.append(block)
            self._generation[block] += 1
            self._owners[block].add(owner)
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int], owner: Owner) -> None:
        """Make `owner` one more owner of blocks that are owned or cached."""
        for block in blocks:
            owners = self._owners[block]
            if owner in owners:
                raise IntegrityError(f"block {block} already belongs to {owner}")
            if not owners and self._cached.pop(block, None) is None:
                raise IntegrityError(f"block {block} is free and cannot be shared with {owner}")
            owners.add(owner)

    def release(self, blocks: Sequence[int], owner: Owner) -> None:
        """End `owner`'s hold. The last of a sequence's blocks is evicted first, since it is of least use alone."""
        for block in reversed(blocks):
            owners = self._owners[block]
            if owner not in owners:
                raise IntegrityError(f"block {block} does not belong to {owner} but to {sorted(owners)}")
            owners.discard(owner)
            if owners:
                continue
            if block in self._published:
                self._cached[block] = self._sent
            elif self._sent > self._back:
                self._draining.append((self._sent, block))
            else:
                self._recycle(block)

    # -- prefix index ---------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks that hold the longest published prefix of `keys`. Pin them with `share` before anything else."""
        found = []
        for key in keys:
            block = self._index.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, block: int, generation: int, chain: Sequence[BlockKey], depth: int, digest: bytes) -> bool:
        """Enter a full, verified block into the prefix index. False: stale, or another block has this key already.

        `chain`: the keys of its sequence's blocks; its own is that at `depth`.
        """
        key = chain[depth]
        if self._generation[block] != generation or not self._owners[block]:
            return False
        if key in self._index or block in self._published:
            return False
        self._index[key] = block
        self._published[block] = Published(key, digest, chain[depth - 1] if depth else None, depth)
        if (depth + 1) % self.routing_stride == 0:
            self._routing[key] = None
            self._news[key] = True
        return True

    def withdraw(self, block: int) -> list[int]:
        """Take a block that failed its check out of the index, and all whose chain goes through it: they may have been
        computed from what is wrong. So may those whose chain is broken already: nobody can match them, until somebody
        computes what is missing. Whoever owns one keeps it, private. Returns those taken out."""
        failed = self._published.get(block)
        return [] if failed is None else self._withdraw_after(failed.key, [block])

    def withdraw_after(self, key: BlockKey) -> list[int]:
        """The same for a private block of this key: what others published under the key itself is right."""
        return self._withdraw_after(key, [])

    def digest_of(self, block: int) -> bytes:
        """The digest a published block was entered with."""
        return self._published[block].digest

    def is_published(self, block: int) -> bool:
        return block in self._published

    def is_kept(self, block: int, generation: int) -> bool:
        """Whether the block is in the life of this generation, and owned or cached: its bytes mean something."""
        return self._generation[block] == generation and (bool(self._owners[block]) or block in self._cached)

    def keys(self) -> list[BlockKey]:
        """Every key in the prefix index."""
        return list(self._index)

    def routing_keys(self) -> list[BlockKey]:
        """The keys of every routing block in the prefix index: what routers are told of."""
        return list(self._routing)

    def take_events(self) -> tuple[list[BlockKey], list[BlockKey]]:
        """Keys of routing blocks (stored, removed) since the last call; one that came and went again is removed."""
        news, self._news = self._news, {}
        stored = [key for key, is_stored in news.items() if is_stored]
        return stored, [key for key, is_stored in news.items() if not is_stored]

    def take_recycled(self) -> list[int]:
        """Blocks whose content lost its meaning since the last call (to be poisoned in tests)."""
        recycled, self.recycled = self.recycled, []
        return recycled

    # -- inside ---------------------------------------------------------------------------------------------------

    def _withdraw_after(self, key: BlockKey, blocks: list[int]) -> list[int]:
        """Withdraw `blocks` and all whose chain goes on from `key`, or is broken; returns them all."""
        doubted = {key}
        for other, entry in sorted(self._published.items(), key=lambda each: each[1].depth):
            broken = entry.parent is not None and entry.parent not in self._index
            if other not in blocks and (broken or entry.parent in doubted):
                doubted.add(entry.key)
                blocks.append(other)
        for each in blocks:
            self._unpublish(each)
            plan = self._cached.pop(each, None)
            if plan is not None and plan > self._back:
                self._draining.append((self._sent, each))
            elif plan is not None:
                self._recycle(each)
        return blocks

    def _recycle(self, block: int) -> None:
        self._free.append(block)
        self.recycled.append(block)

    def _unpublish(self, block: int) -> None:
        key = self._published.pop(block).key
        del self._index[key]
        if key in self._routing:
            del self._routing[key]
            self._news[key] = False

    def check_integrity(self) -> None:
        """Audit everything. Raises IntegrityError naming the first contradiction."""
        free, cached, draining = set(self._free), set(self._cached), {b for _, b in self._draining}
        owned = {b for b in range(self.num_blocks) if self._owners[b]}
        if len(free) != len(self._free) or len(draining) != len(self._draining):
            raise IntegrityError("a block is listed twice")
        if len(free) + len(cached) + len(draining) + len(owned) != self.num_blocks:
            raise IntegrityError(
                f"{len(free)} free + {len(cached)} cached + {len(draining)} draining + {len(owned)} owned"
                f" != {self.num_blocks} blocks"
            )
        if free | cached | draining | owned != set(range(self.num_blocks)):
            raise IntegrityError("a block is in two places")
        if {entry.key: block for block, entry in self._published.items()} != self._index:
            raise IntegrityError("prefix index and published blocks disagree")
        if not self._routing.keys() <= self._index.keys():
            raise IntegrityError("a routing block is not in the prefix index")
        if not cached <= self._published.keys() or (free | draining) & self._published.keys():
            raise IntegrityError("a published block is free, or a cached one is not published")
        if self._draining and self._sent <= self._back:
            raise IntegrityError("blocks wait for a plan although none is in flight")
