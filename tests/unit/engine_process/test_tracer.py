"""The tracer tells right KV from every kind of wrong KV."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.core.clock import ManualClock
from engine.messages import SampleSpec, TracerModel
from engine.model.base import ForwardRow
from engine.model.tracer import GREEDY, TracerModelRunner, reference_tokens

SPEC = TracerModel(vocab_size=200, layers=2, kv_heads=2)
SIZE = 4
TABLE = [7, 2, 9, 0, 5]
PROMPT = [11, 22, 33, 44, 55, 66, 77, 88, 99, 110, 121]
SEEDED = SampleSpec(index=0, seed=42, temperature=1.0, top_p=0.9, top_k=0, logprobs=-1)

Pool = NDArray[np.uint8]


def runner(blocks: int = 12, spec: TracerModel = SPEC) -> tuple[TracerModelRunner, Pool]:
    model = TracerModelRunner(spec, SIZE)
    pool = np.full((blocks, model.layout.block_bytes), 0xFF, np.uint8)
    model.bind(pool)
    return model, pool


def forward(
    model: TracerModelRunner, tokens: list[int], start: int, table: list[int] = TABLE, *, write: bool = True
) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = model.run([ForwardRow(tokens, start, table, write, logits=True)])[0]
    return logits


def test_golden_tokens_and_fingerprint() -> None:
    spec = TracerModel()
    assert reference_tokens([1, 2, 3], 8, spec) == [1005, 742, 915, 334, 831, 404, 763, 32]
    assert reference_tokens([1, 2, 3], 8, spec, SEEDED) == [210, 204, 464, 315, 505, 673, 258, 746]
    assert TracerModelRunner(spec, 16).fingerprint.hex() == "7c598740552a3eb51b1ad0476673db93"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 199), min_size=1, max_size=30), st.data())
def test_any_chunking_and_table_gives_the_reference(prompt: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(prompt)), max_size=4)) | {len(prompt)})
    table = data.draw(st.permutations(range(12)))
    model, _ = runner()
    start = 0
    for cut in cuts:
        logits = forward(model, prompt[start:cut], start, table)
        start = cut
    tokens = [int(logits.argmax())]
    while len(tokens) < 6:
        tokens.append(int(forward(model, tokens[-1:], len(prompt) + len(tokens) - 1, table).argmax()))
    assert tokens == reference_tokens(prompt, 6, SPEC, stop_at_eos=False)


def test_rows_of_one_batch_do_not_see_each_other() -> None:
    model, _ = runner()
    rows = [
        ForwardRow(PROMPT[:5], 0, [0, 1], write=True, logits=True),
        ForwardRow(PROMPT[:7], 0, [2, 3], write=True, logits=False),
        ForwardRow(PROMPT, 0, [4, 5, 6], write=True, logits=True),
    ]
    logits = model.run(rows)
    assert logits.shape == (2, 200)
    assert logits.dtype == np.float32
    assert [int(row.argmax()) for row in logits] == [
        reference_tokens(PROMPT[:5], 1, SPEC)[0],
        reference_tokens(PROMPT, 1, SPEC)[0],
    ]


def other_prefix(pool: Pool) -> None:
    """The same tokens at the same positions, but behind another first block."""
    model = TracerModelRunner(SPEC, SIZE)
    model.bind(pool)
    scratch = [10, 2, 11]
    forward(model, [12, *PROMPT[1:]], 0, scratch)


def swap_heads(pool: Pool) -> None:
    heads = pool[2].reshape(2, -1)
    heads[:] = heads[::-1].copy()


def swap_layers(pool: Pool) -> None:
    layers = pool[2].reshape(2, 2, -1)
    layers[:] = layers[:, ::-1].copy()


DAMAGES: dict[str, Callable[[Pool], object]] = {
    "zeroed": lambda pool: pool[2].fill(0),
    "poisoned": lambda pool: pool[2].fill(0xFF),
    "another block of the sequence": lambda pool: np.copyto(pool[2], pool[7]),
    "shifted by a position": lambda pool: np.copyto(pool[2], np.roll(pool[2], 16)),
    "heads swapped": swap_heads,
    "layers swapped": swap_layers,
    "behind another prefix": other_prefix,
    "last block lost": lambda pool: pool[9].fill(0),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_wrong_kv_changes_the_logits_and_everything_after(damage: str) -> None:
    model, pool = runner()
    forward(model, PROMPT, 0)
    clean = pool.copy()
    right = forward(model, [5], len(PROMPT))
    np.copyto(pool, clean)
    DAMAGES[damage](pool)
    wrong = forward(model, [5], len(PROMPT))
    assert (wrong != right).mean() > 0.9
    pool[[7, 2]] = clean[[7, 2]]
    right_next = reference_tokens([*PROMPT, 5, 6], 1, SPEC)[0]
    assert int(forward(model, [6], len(PROMPT) + 1).argmax()) != right_next  # what was written since is tainted


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**31), st.integers(1, 255))
def test_any_byte_matters(where: int, flip: int) -> None:
    model, pool = runner()
    forward(model, PROMPT[:8], 0)
    before = pool.copy()
    right = forward(model, [5], 8)
    np.copyto(pool, before)
    used = pool[7] if where % 2 else pool[2]
    used[where // 2 % len(used)] ^= flip
    assert (forward(model, [5], 8) != right).any()


def test_what_lies_beyond_the_sequence_does_not_matter() -> None:
    model, pool = runner()
    forward(model, PROMPT[:6], 0)
    before = pool.copy()
    right = forward(model, [5], 6)
    words = before.view(np.uint64).reshape(model.layout.shape(len(pool)))
    words[2, :, :, :, 2:] = 12345
    np.copyto(pool, before)
    assert (forward(model, [5], 6) == right).all()


def test_it_reads_the_pool_every_time() -> None:
    model, pool = runner()
    forward(model, PROMPT, 0)
    first = forward(model, PROMPT[-1:], len(PROMPT) - 1, write=False)
    pool[7, 0] ^= 1
    second = forward(model, PROMPT[-1:], len(PROMPT) - 1, write=False)
    pool[7, 0] ^= 1
    assert (first != second).any()
    assert (forward(model, PROMPT[-1:], len(PROMPT) - 1, write=False) == first).all()


def test_a_read_only_row_writes_nothing_and_heeds_its_token() -> None:
    model, pool = runner()
    right = forward(model, PROMPT, 0)
    before = pool.copy()
    assert (forward(model, PROMPT[-1:], len(PROMPT) - 1, write=False) == right).all()
    assert (forward(model, [PROMPT[-1] + 1], len(PROMPT) - 1, write=False) != right).any()
    assert (pool == before).all()


def test_reference_stops_at_the_end_token() -> None:
    spec = TracerModel(vocab_size=4)
    tokens = reference_tokens([1], 50, spec)
    assert tokens.index(3) == len(tokens) - 1 < 49
    assert reference_tokens([1], 50, spec, stop_at_eos=False)[: len(tokens)] == tokens


def test_fingerprint_names_what_changes_bytes_or_tokens() -> None:
    def mark(block_size: int = 16, **changes: float) -> bytes:
        base = {"vocab_size": 64, "layers": 2, "kv_heads": 2, "step_s": 0.0}
        merged = {**base, **changes}
        spec = TracerModel(
            vocab_size=int(merged["vocab_size"]), layers=int(merged["layers"]), kv_heads=int(merged["kv_heads"]),
            step_s=merged["step_s"],
        )  # fmt: skip
        return TracerModelRunner(spec, block_size).fingerprint

    assert mark() == mark() == mark(step_s=0.5)
    assert len({mark(), mark(32), mark(vocab_size=65), mark(layers=3), mark(kv_heads=4)}) == 5


def test_logits_spread_like_a_model_s() -> None:
    model, _ = runner(spec=TracerModel(vocab_size=4096))
    logits = forward(model, PROMPT, 0)
    assert abs(logits.mean()) < 0.2
    assert 2.8 < logits.std() < 3.2


def test_a_step_takes_its_modelled_time() -> None:
    clock = ManualClock()
    slept: list[float] = []
    model = TracerModelRunner(TracerModel(step_s=0.5, token_s=0.01), SIZE, clock, slept.append)
    model.bind(np.zeros((12, model.layout.block_bytes), np.uint8))
    forward(model, PROMPT, 0)
    assert slept == [pytest.approx(0.5 + 0.01 * len(PROMPT))]


def test_a_short_table_is_an_error() -> None:
    model, _ = runner()
    with pytest.raises(IndexError, match="do not fit"):
        forward(model, PROMPT, 0, [1, 2])


def test_sampling_reaches_the_reference() -> None:
    assert reference_tokens(PROMPT, 20, SPEC, SEEDED) != reference_tokens(PROMPT, 20, SPEC, GREEDY)
