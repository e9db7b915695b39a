"""Checkpoint files: what is missing, unexpected or mis-shaped is refused by name; the fingerprint sees changes."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.core.errors import ConfigError, ModelError
from engine.messages import FolderModel
from engine.model.config import load_config
from engine.model.loader import load_model
from engine.model.weights import SAMPLE_BYTES, SAMPLES, Weights, expected_shapes, fingerprint, kv_kind, sample_offsets
from tests.unit.model.conftest import Checkpoint
from tests.unit.model.harness import PagedRun, Sequence, load, random_tokens

Tensors = dict[str, torch.Tensor]
FIRST_Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Checkpoint) -> Path:
    """A copy of a checkpoint that the test may change."""
    return shutil.copytree(checkpoint("llama"), tmp_path / "model")


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> None:
    """Split the single file in two with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {"model-00001.safetensors": names[::2], "model-00002.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in halves.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(FIRST_Q), f"missing in the checkpoint: {FIRST_Q}"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "unexpected tensors in the checkpoint: extra"),
        (lambda tensors: tensors.update({FIRST_Q: torch.zeros(64, 63)}), r"q_proj.weight has shape \[64, 63\]"),
    ],
)
def test_tensors_that_do_not_fit(change: Callable[[Tensors], object], message: str, folder: Path) -> None:
    rewrite(folder, change)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_a_long_list_of_missing_tensors_is_cut(folder: Path) -> None:
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name])
    with pytest.raises(ModelError, match="and 4 more"):
        load(folder)


def test_derived_tensors_of_old_exporters_are_ignored(tmp_path: Path, checkpoint: Checkpoint) -> None:
    folder = shutil.copytree(checkpoint("qwen2"), tmp_path / "model")
    extra = {"lm_head.weight": torch.zeros(320, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    rewrite(folder, lambda tensors: tensors.update(extra))
    assert load(folder).vocab_size == 320


def test_a_sharded_checkpoint_is_the_same_model(folder: Path, checkpoint: Checkpoint) -> None:
    shard(folder)
    tokens = random_tokens(10, seed=3)
    [(_, found)] = PagedRun(load(folder)).feed(Sequence(tokens), 10)
    [(_, expected)] = PagedRun(load(checkpoint("llama"))).feed(Sequence(tokens), 10)
    np.testing.assert_array_equal(found, expected)


def test_files_that_cannot_be_used(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 not safetensors")
    with pytest.raises(ModelError, match="cannot read the weights"):
        load(folder)
    (folder / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(ModelError, match="cannot read"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors nor"):
        load(folder)


@pytest.mark.parametrize("file", ["../secret", "absent.safetensors", 3])
def test_an_index_that_lists_something_else(file: object, folder: Path) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ModelError, match="is not a file of this folder"):
        load(folder)


def test_the_same_tensor_in_two_files(folder: Path) -> None:
    shard(folder)
    save_file(load_file(folder / "model-00001.safetensors"), folder / "model-00002.safetensors")
    with pytest.raises(ModelError, match="is in another file too"):
        load(folder)


def test_taken_tensors_are_private_copies_in_the_dtype(folder: Path) -> None:
    config = load_config(folder)
    original = load_file(folder / "model.safetensors")
    with Weights(folder, config, "bfloat16") as weights:
        taken = {name: weights.take(name) for name in expected_shapes(config)}
        with pytest.raises(ModelError, match="nothing is not in the checkpoint"):
            weights.take("nothing")
    assert taken.keys() == original.keys()
    for name, tensor in taken.items():
        torch.testing.assert_close(tensor, original[name].bfloat16(), rtol=0, atol=0)
    with pytest.raises(ModelError, match="dtype 'int4' is not one of"):
        Weights(folder, config, "int4")


def mark(folder: Path, kv_dtype: str = "float32", block_size: int = 16, **changes: object) -> bytes:
    config = dataclasses.replace(load_config(folder), **changes)  # type: ignore[arg-type]
    return fingerprint(folder, config, kv_dtype, block_size)


def test_kv_that_is_stored_as_it_is_computed_is_named_by_its_dtype_alone() -> None:
    assert kv_kind("bfloat16", "bfloat16") == "bfloat16"


def test_the_fingerprint_sees_all_that_changes_kv_bytes(folder: Path) -> None:
    first = mark(folder)
    assert len(first) == 16
    config = load_config(folder)
    variants = {
        first,
        mark(folder, kv_dtype="bfloat16"),
        mark(folder, kv_kind("bfloat16", "int8")),
        mark(folder, kv_kind("float32", "int8")),
        mark(folder, kv_kind("float32", "int8", converted_from="float32")),
        mark(folder, block_size=8),
        mark(folder, rms_eps=0.5),
        mark(folder, rope=dataclasses.replace(config.rope, theta=5.0)),
        mark(folder, attention=dataclasses.replace(config.attention, window=7)),
    }
    for name in ("model.norm.weight", FIRST_Q):

        def change(tensors: Tensors, name: str = name) -> None:
            tensors[name].view(-1)[-1] += 1

        rewrite(folder, change)
        variants.add(mark(folder))
    assert len(variants) == 11


def test_the_fingerprint_ignores_what_only_ends_a_text_and_where_files_lie(
    folder: Path, checkpoint: Checkpoint
) -> None:
    assert mark(folder) == mark(checkpoint("llama")) == mark(folder, max_context=64, eos_ids=(9,))
    assert load(folder).fingerprint == mark(folder)


@pytest.mark.parametrize("size", [0, 1, SAMPLE_BYTES, 5 * SAMPLE_BYTES + 3, SAMPLES * SAMPLE_BYTES])
def test_small_files_are_sampled_whole(size: int) -> None:
    assert sample_offsets(size) == list(range(0, size, SAMPLE_BYTES))


def test_large_files_are_sampled_evenly_to_the_end() -> None:
    size = 1000 * SAMPLE_BYTES + 17
    offsets = sample_offsets(size)
    assert (len(offsets), offsets[0], offsets[-1]) == (SAMPLES, 0, size - SAMPLE_BYTES)
    steps = np.diff(offsets)
    assert steps.max() - steps.min() <= 1
    assert len(sample_offsets(SAMPLES * SAMPLE_BYTES + 1)) == SAMPLES


def test_loader_reports_the_model(folder: Path) -> None:
    model = load_model(FolderModel(str(folder), "bfloat16", max_context=100), 16, threads=1)
    assert (model.vocab_size, model.max_context, model.eos_ids) == (320, 100, (2, 3))
    assert (model.layout.layers, model.layout.kv_heads, model.layout.head_dim) == (2, 2, 16)
    assert (model.layout.block_size, model.layout.dtype) == (16, "bfloat16")


@pytest.mark.parametrize("limit", [0, -1, 513])
def test_a_context_the_model_does_not_have(limit: int, folder: Path) -> None:
    with pytest.raises(ModelError, match="is not within the model's 512 positions"):
        load_model(FolderModel(str(folder), "float32", max_context=limit), 16, threads=1)


def test_an_impossible_block_size(folder: Path) -> None:
    with pytest.raises(ConfigError, match="block_size is 0"):
        load_model(FolderModel(str(folder), "float32"), 0, threads=1)
