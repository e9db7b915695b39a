"""The engine benchmark's arithmetic: floors, and the rows that a case is made of."""

from benchmarks.engine import (
    BLOCK,
    CHUNKED,
    DECODE,
    Case,
    Figure,
    Floors,
    cases,
    operations,
    steps,
    table,
    weight_bytes,
)
from engine.model.config import parse_config

CONFIG = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    {},
)
LAYER = 64 * (64 + 2 * 32) + 64 * 64 + 2 * 64 * 96 + 96 * 64


def test_a_step_reads_every_weight_once() -> None:
    assert weight_bytes(CONFIG) == 2 * (3 * LAYER + 1000 * 64)


def test_a_prompt_multiplies_every_token_with_every_weight_but_the_last_alone_with_the_vocabulary() -> None:
    assert operations(CONFIG, 10) == 2 * (3 * LAYER * 10 + 1000 * 64)


def test_rows_of_a_batch_share_no_block() -> None:
    ((*rows,),) = steps(Case(DECODE, 4, 129, 1))
    blocks = [block for row in rows for block in row.table]
    assert len(set(blocks)) == len(blocks) == 4 * -(-130 // BLOCK)
    assert all(row.start == 129 and len(row.tokens) == 1 for row in rows)


def test_a_prompt_is_cut_into_chunks_and_only_the_last_wants_logits() -> None:
    parts = [row for (row,) in steps(Case(CHUNKED, 1, 300, 128))]
    assert [(row.start, len(row.tokens), row.logits) for row in parts] == [
        (0, 128, False),
        (128, 128, False),
        (256, 44, True),
    ]


def test_the_share_is_floor_by_time_and_leaves_prefill_attention_out() -> None:
    figures = {"native": {f"{case.kind} {case.label()}": Figure(2.0, 1.0, 0.1) for case in cases()}}
    floors = Floors(read=weight_bytes(CONFIG) + 128.0 * 10, multiply=operations(CONFIG, 1024) / 0.5)
    lines = table(CONFIG, floors, 10, figures).splitlines()
    (decode,) = (line for line in lines if line.startswith("| decode 1 x 128 "))
    (prefill,) = (line for line in lines if line.startswith("| prefill 1024 "))
    assert "| 1000.0 | 50% |" in decode
    assert "| 500.0 | 50% |" in prefill
