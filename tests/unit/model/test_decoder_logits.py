"""The decoder against transformers, in float32, over a pool whose free positions are NaN."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.core.errors import ModelError
from engine.model.base import SCORED_AT_ONCE, ForwardRow
from tests.checkpoints import ARCHITECTURES
from tests.unit.model.conftest import Checkpoint, Reference
from tests.unit.model.harness import PagedRun, Sequence, load, random_tokens

TOKENS = random_tokens(75, seed=1)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    **{name: (name, {}) for name in ARCHITECTURES},
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
    "yarn rope": ("qwen2", {"rope_parameters": YARN}),
    "all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "no grouping": ("llama", {"num_key_value_heads": 4}),
}


def close(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def llama(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_the_logits_of_transformers(
    variant: str, checkpoint: Checkpoint, reference: Reference
) -> None:
    architecture, overrides = VARIANTS[variant]
    folder = checkpoint(architecture, **overrides)
    expected = reference(folder, TOKENS)
    run = PagedRun(load(folder))
    for chunk in (len(TOKENS), 16):
        for position, logits in run.feed(Sequence(TOKENS), chunk):
            close(logits, expected[position])


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("chunk", [1, 13, 64])
def test_chunks_of_any_size_give_the_same_logits(
    chunk: int, block_size: int, llama: Path, reference: Reference
) -> None:
    expected = reference(llama, TOKENS)
    found = PagedRun(load(llama, block_size)).feed(Sequence(TOKENS), chunk)
    assert len(found) == -(-len(TOKENS) // chunk)
    for position, logits in found:
        close(logits, expected[position])


@pytest.mark.parametrize("chunk", [7, 75])
def test_every_position_can_be_told_whatever_the_chunks(chunk: int, llama: Path, reference: Reference) -> None:
    """Beside rows that tell nothing, or a part: the pieces come in order of rows, and never more than there may be."""
    run, told = PagedRun(load(llama)), list[NDArray[np.float32]]()
    sequence, others = Sequence(TOKENS), [Sequence(random_tokens(75, seed=n)) for n in (8, 9)]
    every, part = [], []
    while sequence.done < len(TOKENS):
        first = sequence.done
        rows = [run.row(s, min(chunk, len(TOKENS) - s.done), logits=False) for s in (others[0], sequence, others[1])]
        told.clear()
        rows[1] = replace(rows[1], scored=range(len(rows[1].tokens)))
        rows[2] = replace(rows[2], scored=range(3, len(rows[2].tokens)))
        assert run.model.run(rows, told.append).shape == (0, run.model.vocab_size)
        assert max(map(len, told)) <= SCORED_AT_ONCE
        logits, own = np.concatenate(told), len(rows[1].tokens)
        every.append(logits[:own])
        part.append((first + 3, logits[own:]))
    close(np.concatenate(every), reference(llama, TOKENS))
    for start, logits in part:
        close(logits, reference(llama, others[1].tokens)[start : start + len(logits)])


def test_rows_of_many_shapes_in_one_step(llama: Path, reference: Reference) -> None:
    run = PagedRun(load(llama, 8), num_blocks=128)
    sequences = [Sequence(random_tokens(length, seed=length)) for length in (3, 40, 41, 75, 200, 18)]
    counts = [1, 1, 30, 64, 1, 17]
    for sequence, count in zip(sequences, counts, strict=True):
        before = len(sequence.tokens) - count
        if before:
            run.model.run([run.row(sequence, before, logits=False)])
    wants = [True, True, False, True, True, True]
    rows = [run.row(s, count, logits=want) for s, count, want in zip(sequences, counts, wants, strict=True)]
    found = run.model.run(rows)
    expected = [reference(llama, s.tokens)[-1] for s, want in zip(sequences, wants, strict=True) if want]
    close(found, np.stack(expected))


def test_sequences_that_share_prefix_blocks(llama: Path, reference: Reference) -> None:
    run = PagedRun(load(llama, 8))
    prefix = random_tokens(24, seed=5)
    first = Sequence(prefix + random_tokens(9, seed=6))
    run.feed(first, 64)
    before = run.pool[first.table[:3]].copy()
    others = [Sequence(prefix + random_tokens(count, seed=count), first.table[:3], 24) for count in (1, 20)]
    found = run.model.run([run.row(s, len(s.tokens) - 24) for s in others])
    close(found, np.stack([reference(llama, s.tokens)[-1] for s in others]))
    np.testing.assert_array_equal(run.pool[first.table[:3]], before)


def test_a_read_only_row_gives_the_logits_and_writes_nothing(llama: Path, reference: Reference) -> None:
    run = PagedRun(load(llama))
    sequence, other = Sequence(TOKENS[:32]), Sequence(TOKENS[40:60])
    run.feed(sequence, 32)
    before = run.pool.copy()
    again = ForwardRow(TOKENS[31:32], 31, sequence.table, write=False, logits=True)
    close(run.model.run([again])[0], reference(llama, TOKENS[:32])[-1])
    np.testing.assert_array_equal(run.pool, before)
    found = run.model.run([again, run.row(other, 20)])  # beside a row that writes
    close(found, np.stack([reference(llama, TOKENS[:32])[-1], reference(llama, TOKENS[40:60])[-1]]))
    np.testing.assert_array_equal(run.pool[sequence.table], before[sequence.table])


def test_a_row_writes_its_own_positions_and_nothing_else(llama: Path) -> None:
    run = PagedRun(load(llama))
    sequence = Sequence(TOKENS[:20])
    run.feed(sequence, 20)
    values = run.pool.view(np.float32).reshape(run.model.layout.shape(len(run.pool)))
    written = ~np.isnan(values)
    assert written[sequence.table[0]].all()
    assert written[sequence.table[1], :, :, :, :4].all()
    written[sequence.table[0]] = False
    written[sequence.table[1], :, :, :, :4] = False
    assert not written.any()


def test_the_window_hides_old_positions_and_their_blocks(checkpoint: Checkpoint, reference: Reference) -> None:
    folder = checkpoint("mistral-window")
    run = PagedRun(load(folder, 8))
    sequence = Sequence(TOKENS)
    run.model.run([run.row(sequence, 70, logits=False)])
    run.pool[sequence.table[:6]] = 0xFF  # positions 0..47; position 70 sees 50..70
    close(run.model.run([run.row(sequence, 1)])[0], reference(folder, TOKENS)[70])


def test_bfloat16_is_finite_and_near(checkpoint: Checkpoint, reference: Reference) -> None:
    for architecture in ("llama", "qwen2", "qwen3"):
        folder = checkpoint(architecture)
        for chunk in (75, 7):
            position, logits = PagedRun(load(folder, dtype="bfloat16")).feed(Sequence(TOKENS), chunk)[-1]
            expected = reference(folder, TOKENS)[position]
            assert np.isfinite(logits).all()
            assert np.corrcoef(logits, expected)[0, 1] > 0.99


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_split_into_chunks_and_rows_gives_the_same_logits(
    data: st.DataObject, checkpoint: Checkpoint, reference: Reference
) -> None:
    folder = checkpoint("qwen3")
    run = PagedRun(load(folder, data.draw(st.sampled_from([8, 16]), label="block size")), seed=data.draw(st.integers()))
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4), label="lengths")
    sequences = [Sequence(random_tokens(length, seed=index)) for index, length in enumerate(lengths)]
    expected = {id(s): reference(folder, s.tokens) for s in sequences}
    while pending := [s for s in sequences if s.done < len(s.tokens)]:
        chosen = data.draw(st.lists(st.sampled_from(pending), min_size=1, unique_by=id), label="rows")
        rows = [run.row(s, data.draw(st.integers(1, len(s.tokens) - s.done), label="chunk")) for s in chosen]
        for sequence, logits in zip(chosen, run.model.run(rows), strict=True):
            close(logits, expected[id(sequence)][sequence.done - 1])


def test_no_rows_and_no_wanted_logits(llama: Path) -> None:
    run = PagedRun(load(llama))
    assert run.model.run([]).shape == (0, 320)
    assert run.model.run([run.row(Sequence(TOKENS), 5, logits=False)]).shape == (0, 320)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ForwardRow([1], 16, [0], write=True, logits=True), "row 0: a table of 1 blocks, needs 2"),
        (ForwardRow([], 0, [0], write=True, logits=True), "row 0: 0 tokens"),
        (ForwardRow([1], -1, [0], write=True, logits=True), "at position -1"),
        (ForwardRow([1], 0, [64], write=True, logits=True), "a block outside of 0..63"),
        (ForwardRow([320], 0, [0], write=True, logits=True), "a token id outside of 0..319"),
        (
            ForwardRow([1] * 2, 511, list(range(33)), write=True, logits=True),
            "position 512 is beyond the context of 512",
        ),
    ],
)
def test_a_row_that_cannot_run_is_refused_before_anything_is_written(
    row: ForwardRow, message: str, llama: Path
) -> None:
    run = PagedRun(load(llama))
    with pytest.raises(ModelError, match=message):
        run.model.run([row])
    assert (run.pool == 0xFF).all()


def test_a_model_without_a_fitting_pool(llama: Path) -> None:
    model = load(llama)
    with pytest.raises(ModelError, match="no pool yet"):
        model.run([ForwardRow([1], 0, [0], write=True, logits=True)])
    with pytest.raises(ModelError, match="not contiguous blocks"):
        model.bind(np.zeros((4, 100), dtype=np.uint8))
