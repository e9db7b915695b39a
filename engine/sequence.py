"""Sequences and groups: what a worker's scheduler knows of a request.

A group is one attempt: a *prompt sequence*, read once, and up to n *sample sequences* that start where it ends. The
first sample takes the prompt sequence over with all its blocks; the others share its full blocks and compute the last
`length mod block_size` positions for themselves, so no block is ever written by two.
"""

from dataclasses import dataclass, field

from cluster.core.keys import BlockKey, KeyChain
from engine.blocks import BlockBooks, Owner
from engine.messages import DrawRules, Grammar, SampleSpec, Start
from engine.scoring import Scoring

MAX_SAMPLES = 128  # of one group


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens. `tokens` holds the prompt and everything emitted; KV exists for positions [0, computed).

    `draws`: what to draw when the last token's logits come out; empty: only compute. `rules`: what earlier tokens say
    about it; None: nothing. `scoring`: what is wanted of the prompt's own tokens; None: nothing.
    """

    id: int
    tokens: list[int]
    chain: KeyChain
    draws: list[SampleSpec]
    arrival: float
    rules: DrawRules | None = None
    scoring: Scoring | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    in_flight: int = 0  # positions of the plan in flight
    known_blocks: int = 0  # entries of the block table that the engine has
    knows_rules: bool = False  # the engine does, and follows the tokens from there
    last_plan: int = 0
    runnable: bool = False

    @property
    def owner(self) -> Owner:
        return f"sequence {self.id}"

    @property
    def remaining(self) -> int:
        """Positions still to be computed before the next draw (at least 1: a complete one is re-run read-only)."""
        return max(1, len(self.tokens) - self.computed)

    @property
    def decoding(self) -> bool:
        """One position a step: the row that writes the last token and draws the next."""
        return self.remaining == 1

    def keys(self) -> list[BlockKey]:
        """Keys of all full blocks of `tokens`."""
        return self.chain.extend(self.tokens)

    @property
    def grammar(self) -> Grammar | None:
        """What its draws must keep to."""
        return None if self.rules is None else self.rules.grammar

    def start_rules(self) -> Start | None:
        """What the engine must hear with a row that draws."""
        if self.rules is None or self.knows_rules:
            return None
        return Start(self.rules, list(self.tokens))

    def reserve(self, books: BlockBooks, positions: int, block_size: int) -> bool:
        """Own blocks for positions [0, positions). False, and nothing changes, when there are not enough."""
        missing = -(-positions // block_size) - len(self.blocks)
        if missing <= 0:
            return True
        taken = books.allocate(missing, self.owner)
        if taken is None:
            return False
        self.blocks += taken
        return True

    def release(self, books: BlockBooks) -> None:
        """Give every block back; harmless when there are none."""
        self.runnable = False
        blocks, self.blocks = self.blocks, []
        books.release(blocks, self.owner)
