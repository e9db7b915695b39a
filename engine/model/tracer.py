"""The tracer: a model without weights whose every token proves the KV it was computed from (DESIGN §7).

What it stores, for each position p, layer l and head h, in the real block pool as int64 (head_dim 2):
    K = (token, p)        V = (salt[l, h], chain(p) ^ salt[l, h])
    chain(p) = chain(p - 1) + M(token * A + (p + 1) * B + SALT)         chain(-1) = SALT, modulo 2**64
so the KV of a position depends on all tokens before it, as in a real model, and the same tokens behind another prefix
are other bytes. M is splitmix64's output function.

How a row is run:
1. Read every word of positions 0..start-1 back through the block table. The tokens found there give the chain that
   should be there; each word that differs from what it should be is mixed, with its place, into `damage` (0 if none).
2. Write the row's own positions. Their chain starts at chain(start - 1) + damage, so damage is inherited.
3. Read the own positions back; what differs is damage too. The logits of position p are a hash of chain(p) + damage.
A block that is lost, stale, shifted, zeroed, poisoned, or another sequence's therefore changes the next token. Nothing
is kept between calls but tables of constants: each run really reads the pool.

Shapes: N blocks of the table, H kv heads, L layers, S block_size, V vocabulary.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.core import clock as machine_clock
from cluster.core.clock import Clock, SystemClock
from cluster.core.digest import splitmix64, weights
from engine.layout import KVLayout
from engine.messages import DrawRules, SampleSpec, TracerModel
from engine.model.base import SCORED_AT_ONCE, ForwardRow, OnLogits, ignore_logits
from engine.noise import GOLDEN, MASK, mix
from engine.rules import Fold, Matcher
from engine.sampler import sample_row

VERSION = 1
GREEDY = SampleSpec(index=0, seed=0, temperature=0.0, top_p=1.0, top_k=0, logprobs=-1)
_A, _B = 0xD1B54A32D192ED03, 0xABC98388FB8FAC03  # two odd constants without structure
# Four 16-bit uniforms summed have standard deviation sqrt(4 / 12) * 2**16 around 2 * 65535. Scaled to 3, about what
# the logits of real models have.
_LOGIT_SCALE = np.float32(3.0 / (65536 * (4 / 12) ** 0.5))
_LOW_HALVES = np.uint64(0x0000FFFF0000FFFF)
_LOGIT_MEAN = np.float32(2 * 65535)

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Constants:
    """What depends on the spec and on nothing else."""

    salt: int
    salts_HL: Words
    steps_V: Words

    @staticmethod
    def of(spec: TracerModel) -> "_Constants":
        shape = f"tracer {VERSION} {spec.vocab_size} {spec.layers} {spec.kv_heads}"
        salt = int.from_bytes(hashlib.blake2b(shape.encode(), digest_size=8).digest(), "little")
        units = np.arange(1, spec.layers * spec.kv_heads + 1, dtype=np.uint64)
        salts = splitmix64(units * np.uint64(GOLDEN) + np.uint64(salt))
        steps = np.arange(1, spec.vocab_size + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        return _Constants(salt, salts.reshape(spec.kv_heads, spec.layers), steps)

    def logits(self, state: int) -> NDArray[np.float32]:
        """Pseudo-random logits [V], about N(0, 3): greedy has clear margins and temperature has something to do."""
        words_V = splitmix64(self.steps_V + np.uint64(mix(state + GOLDEN)))
        pairs_V = (words_V & _LOW_HALVES) + ((words_V >> np.uint64(16)) & _LOW_HALVES)
        sums_V = (pairs_V & np.uint64(0xFFFFFFFF)) + (pairs_V >> np.uint64(32))
        logits_V: NDArray[np.float32] = sums_V.astype(np.float32)
        logits_V -= _LOGIT_MEAN
        logits_V *= _LOGIT_SCALE
        return logits_V


class TracerModelRunner:
    """A `Model` (engine/model/base.py) in numpy alone. One step takes at least step_s + token_s * tokens seconds."""

    def __init__(
        self,
        spec: TracerModel,
        block_size: int,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = machine_clock.sleep,
    ) -> None:
        self.layout = KVLayout(spec.layers, spec.kv_heads, head_dim=2, block_size=block_size, dtype="int64")
        self.vocab_size = spec.vocab_size
        self.max_context = spec.max_context
        self.eos_ids: tuple[int, ...] = (spec.vocab_size - 1,)
        self.fingerprint = _fingerprint(spec, block_size)
        self.device = "cpu"
        self._spec = spec
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._constants = _Constants.of(spec)
        self._pool: Words = np.empty(self.layout.shape(0), np.uint64)
        self._positions: Words = np.empty(0, np.uint64)
        self._position_terms: Words = np.empty(0, np.uint64)

    def bind(self, pool: NDArray[np.uint8]) -> None:
        """Use `pool` [num_blocks, block_bytes]. Raises ValueError when its rows are not blocks of this layout."""
        self._pool = pool.view(np.uint64).reshape(self.layout.shape(len(pool)))

    def run(self, rows: list[ForwardRow], on_logits: OnLogits = ignore_logits) -> NDArray[np.float32]:
        """One step. Returns logits [rows with `logits`, V]. Raises IndexError for a table that is too short."""
        started = self._clock.now()
        states = [self._run_row(row) for row in rows]
        scored = [own[place] for row, own in zip(rows, states, strict=True) for place in row.scored]
        for first in range(0, len(scored), SCORED_AT_ONCE):
            on_logits(self._logits(scored[first : first + SCORED_AT_ONCE]))
        logits = self._logits([own[-1] for row, own in zip(rows, states, strict=True) if row.logits])
        self._pace(started, sum(len(row.tokens) for row in rows))
        return logits

    def _logits(self, states: list[int]) -> NDArray[np.float32]:
        logits = np.empty((len(states), self.vocab_size), np.float32)
        for place, state in enumerate(states):
            logits[place] = self._constants.logits(state)
        return logits

    def _pace(self, started: float, tokens: int) -> None:
        left = self._spec.step_s + self._spec.token_s * tokens - (self._clock.now() - started)
        if left > 0:
            self._sleep(left)

    def _run_row(self, row: ForwardRow) -> list[int]:
        """Run one row; what the logits of its positions are made of: of all when any are scored, else of the last."""
        end = row.start + len(row.tokens)
        size = self.layout.block_size
        if end > len(row.table) * size:
            raise IndexError(f"positions up to {end} do not fit {len(row.table)} blocks of {size}")
        table = np.array(row.table[: -(-end // size)], np.int64)
        self._grow_constants(len(table) * size)
        if not row.write:
            state, tokens = self._read(table, end)
            # K and V are in the pool already, but the query is the token that was given.
            found = tokens[row.start : end].tolist()
            given = sum(mix((a ^ b) * GOLDEN) for a, b in zip(row.tokens, found, strict=True))
            return [(state + given) & MASK]
        before = self._constants.salt
        if row.start:
            before, _ = self._read(table, row.start)
        return self._write(table, row, before)

    def _grow_constants(self, positions: int) -> None:
        if positions > len(self._positions):
            self._positions = np.arange(2 * positions, dtype=np.uint64)
            self._position_terms = (self._positions + np.uint64(1)) * np.uint64(_B) + np.uint64(self._constants.salt)

    def _write(self, table: NDArray[np.int64], row: ForwardRow, before: int) -> list[int]:
        """Store the row's positions behind state `before`, read them back, and return the states after them."""
        size = self.layout.block_size
        positions = np.arange(row.start, row.start + len(row.tokens))
        tokens = np.array(row.tokens, np.int64).view(np.uint64)
        links = splitmix64(tokens * np.uint64(_A) + self._position_terms[row.start : row.start + len(tokens)])
        chain = np.cumsum(links, dtype=np.uint64) + np.uint64(before)
        salts_HL = self._constants.salts_HL
        words = np.empty((len(tokens), *salts_HL.shape, 2, 2), np.uint64)
        words[:, :, :, 0, 0] = tokens[:, None, None]
        words[:, :, :, 0, 1] = positions[:, None, None]
        words[:, :, :, 1, 0] = salts_HL
        words[:, :, :, 1, 1] = chain[:, None, None] ^ salts_HL
        blocks, offsets = table[positions // size], positions % size
        self._pool[blocks, :, :, :, offsets] = words
        damage = _damage(self._pool[blocks, :, :, :, offsets] ^ words)
        return [(int(state) + damage) & MASK for state in (chain if row.scored else chain[-1:])]

    def _read(self, table: NDArray[np.int64], end: int) -> tuple[int, Words]:
        """Read positions 0..end-1 back from the pool. Returns chain(end - 1) + damage, and the tokens found there."""
        size = self.layout.block_size
        blocks_NHL2S2 = self._pool[table[: -(-end // size)]]
        span = len(blocks_NHL2S2) * size
        tokens_NS = blocks_NHL2S2[:, 0, 0, 0, :, 0].copy()
        links = splitmix64(tokens_NS.reshape(-1) * np.uint64(_A) + self._position_terms[:span])
        chain = np.cumsum(links, dtype=np.uint64) + np.uint64(self._constants.salt)
        expected_N2S2 = np.zeros((len(blocks_NHL2S2), 2, size, 2), np.uint64)
        expected_N2S2[:, 0, :, 0] = tokens_NS
        expected_N2S2[:, 0, :, 1] = self._positions[:span].reshape(-1, size)
        expected_N2S2[:, 1, :, 1] = chain.reshape(-1, size)
        # From here on the copy holds differences: 0 where the pool holds what it should.
        blocks_NHL2S2 ^= expected_N2S2[:, None, None]
        blocks_NHL2S2[:, :, :, 1] ^= self._constants.salts_HL[:, :, None, None]
        if end % size:
            blocks_NHL2S2[-1, :, :, :, end % size :] = 0  # beyond the end: not this sequence's business
        return (int(chain[end - 1]) + _damage(blocks_NHL2S2)) & MASK, tokens_NS.reshape(-1)


def _damage(differences: Words) -> int:
    """0 when all differences are 0; otherwise a hash of each with its place."""
    if not differences.any():
        return 0
    mixed = splitmix64(differences.reshape(-1)) * weights(differences.size)  # splitmix64 keeps 0 at 0
    return int(mixed.sum(dtype=np.uint64))


def _fingerprint(spec: TracerModel, block_size: int) -> bytes:
    """Names what changes KV bytes or tokens: the shape, not the pace."""
    text = f"tracer {VERSION} {spec.vocab_size} {spec.layers} {spec.kv_heads} {block_size}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def reference_tokens(
    prompt: list[int],
    count: int,
    spec: TracerModel,
    sampling: SampleSpec = GREEDY,
    *,
    stop_at_eos: bool = True,
    rules: DrawRules | None = None,
    grammar: Callable[[], Matcher] | None = None,
) -> list[int]:
    """What a tracer must answer to `prompt`: at most `count` tokens, the last one the end token when it comes earlier.

    No pool, no engine, no cache: plain integers over plain lists, the judge in tests. Only the formulas are shared.
    `grammar`: gives a matcher at the start of the grammar that `rules` name.
    """
    constants = _Constants.of(spec)
    chain = constants.salt
    for position, token in enumerate(prompt):
        chain = _link(chain, token, position, constants.salt)
    tokens: list[int] = []
    while len(tokens) < count:
        position = len(prompt) + len(tokens)
        logits = constants.logits(chain)
        shaped = None
        if rules is not None:  # folded anew each time: what a draw owes to earlier tokens depends on them alone
            ends, matcher = [spec.vocab_size - 1], grammar() if grammar else None
            fold = Fold(rules, [*prompt, *tokens], vocab_size=spec.vocab_size, eos_ids=ends, matcher=matcher)
            shaped = fold.shape(logits)
        token = sample_row(logits, [sampling], position, shaped)[0].token
        tokens.append(token)
        if stop_at_eos and token == spec.vocab_size - 1:
            break
        chain = _link(chain, token, position, constants.salt)
    return tokens


def reference_logprobs(tokens: list[int], spec: TracerModel) -> NDArray[np.float64]:
    """Log-probabilities [positions, V] of what comes after each of `tokens`; no rule or temperature changes them."""
    logits = reference_logits(tokens, spec).astype(float)
    top = logits.max(axis=1, keepdims=True)
    logprobs: NDArray[np.float64] = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    return logprobs


def reference_logits(prompt: list[int], spec: TracerModel) -> NDArray[np.float32]:
    """The logits [positions, V] that a tracer has at each position of `prompt`, from the formulas alone."""
    constants = _Constants.of(spec)
    chain, rows = constants.salt, []
    for position, token in enumerate(prompt):
        chain = _link(chain, token, position, constants.salt)
        rows.append(constants.logits(chain))
    return np.array(rows, np.float32)


def _link(chain: int, token: int, position: int, salt: int) -> int:
    return (chain + mix(token * _A + (position + 1) * _B + salt)) & MASK
