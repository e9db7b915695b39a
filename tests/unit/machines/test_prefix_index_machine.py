"""The prefix index against plain sets: what it believes of each worker, whatever comes in whatever order.

A roomy table believes everything. A tiny one refuses some, says how many, and is right about all others.
"""

from hashlib import blake2b

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.prefix_index import PrefixIndex
from tests.stateful import long, quick

POOL = [blake2b(bytes([number]), digest_size=16).digest() for number in range(24)]
MOST = 18  # blocks of each worker
places = st.integers(0, len(POOL) - 1)
some = st.lists(places, max_size=12)
workers = st.integers(0, 3)


class Index(RuleBasedStateMachine):
    """Four workers that come and go, on a table with room for all they could hold, or for hardly anything."""

    @initialize(entries=st.sampled_from([4, 20, 1000]), crowd=st.sampled_from([0, 62, 64]))
    def begin(self, entries: int, crowd: int) -> None:
        self.roomy = entries == 1000
        self.index = PrefixIndex(entries, sweep_slots=max(8, entries // 2))
        self.crowd = list(map(self.index.join, [1] * crowd))  # so that the workers lie in two groups
        self.numbers: dict[int, int] = {}
        self.held: dict[int, set[bytes]] = {}
        for worker in range(2):
            self.join(worker)

    @rule(worker=workers)
    def join(self, worker: int) -> None:
        if worker in self.numbers:
            return
        number = self.index.join(MOST)
        assert number is not None
        assert number not in self.numbers.values()
        assert number not in self.crowd
        self.numbers[worker], self.held[worker] = number, set()
        assert self.index.count(number) == 0
        assert number not in {n for key in POOL for n in self.index.match([key])}, "it knows what another life held"

    @rule(worker=workers)
    def leave(self, worker: int) -> None:
        if worker in self.numbers:
            self.index.leave(self.numbers.pop(worker))
            del self.held[worker]

    @rule(worker=workers, places=some)
    def store(self, worker: int, places: list[int]) -> None:
        """A batch, with keys in it that are known already, or twice."""
        if worker not in self.numbers:
            return
        keys = [POOL[place] for place in places]
        refused = self.index.refused
        self.index.store(self.numbers[worker], b"".join(keys))
        known = self.known(worker)
        assert self.held[worker] <= known, "what it knew is lost"
        wanted = self.held[worker] | set(keys)
        assert known <= wanted
        assert len(wanted - known) == self.index.refused - refused
        if self.roomy:
            assert len(known) == min(len(wanted), MOST)
        self.held[worker] = known

    @rule(worker=workers, places=some)
    def remove(self, worker: int, places: list[int]) -> None:
        """A batch, with keys in it that are not known, or twice."""
        if worker in self.numbers:
            keys = [POOL[place] for place in places]
            self.index.remove(self.numbers[worker], b"".join(keys))
            self.held[worker] -= set(keys)

    @rule()
    def sweep(self) -> None:
        self.index.sweep()

    @precondition(lambda self: hasattr(self, "index"))
    @rule(chain=st.lists(places, min_size=1, max_size=8, unique=True))
    def match(self, chain: list[int]) -> None:
        """The longest prefix of each, for all at once."""
        keys = [POOL[place] for place in chain]
        expected = {}
        for worker, number in self.numbers.items():
            depth = next((at for at, key in enumerate(keys) if key not in self.held[worker]), len(keys))
            if depth:
                expected[number] = depth
        assert self.index.match(keys) == expected

    def known(self, worker: int) -> set[bytes]:
        return {key for key in POOL if self.numbers[worker] in self.index.match([key])}

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check_integrity()
        for worker, number in self.numbers.items():
            assert self.index.count(number) == len(self.held[worker])
        assert self.index.entries == sum(map(len, self.held.values()))

    def teardown(self) -> None:
        """Once all are gone and swept, nothing is left, and the numbers are given out again."""
        if not hasattr(self, "index"):
            return
        for number in (*self.numbers.values(), *self.crowd):
            assert number is not None
            self.index.leave(number)
        while self.index.leaving:
            self.index.sweep()
        self.index.check_integrity()
        assert self.index.entries == 0
        assert [self.index.join(1) for _ in range(2)] == [0, 1]


TestIndex = quick(Index, examples=40, steps=25)
TestIndexLong = long(Index, examples=600, steps=60)
