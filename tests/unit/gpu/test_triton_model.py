"""A whole model through the kernels, in Triton's interpreter, beside the torch reference."""

from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.core.errors import IntegrityError, ModelError
from engine.gpu import operators
from engine.messages import FolderModel
from engine.model.base import ForwardRow, Model
from engine.model.loader import load_model, warm_up
from engine.model.operators import TorchOperators
from tests.checkpoints import ARCHITECTURES, make_checkpoint
from tests.unit.model.harness import PagedRun, Sequence, load, random_tokens


def both(folder: Path, lengths: tuple[int, int], chunk: int) -> None:
    """Two prompts in chunks, one row behind the other, then a token each; every logit of both models."""
    runs = [PagedRun(load(folder, 8, kernels="torch")), PagedRun(load(folder, 8, kernels="triton"))]
    pairs = [[Sequence(random_tokens(length + 1, length)) for length in lengths] for _ in runs]
    while any(s.done < len(s.tokens) for s in pairs[0]):
        found = []
        for run, sequences in zip(runs, pairs, strict=True):
            going = [s for s in sequences if s.done < len(s.tokens)]
            counts = [min(chunk, len(s.tokens) - 1 - s.done) or 1 for s in going]
            found.append(run.model.run([run.row(s, count) for s, count in zip(going, counts, strict=True)]))
        np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_a_model_has_the_logits_of_the_reference(tmp_path: Path) -> None:
    both(make_checkpoint(tmp_path, "qwen3"), (9, 3), 5)  # norm of q and k, a head_dim of its own


@pytest.mark.verify
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_the_logits_of_the_reference(architecture: str, tmp_path: Path) -> None:
    both(make_checkpoint(tmp_path, architecture), (70, 23), 19)


def test_bad_rows_are_refused_and_a_warm_up_writes_nothing(tmp_path: Path) -> None:
    model: Model = load(make_checkpoint(tmp_path, "llama", num_hidden_layers=1), 8, "bfloat16", kernels="triton")
    with pytest.raises(ModelError, match="no pool yet"):
        model.run([ForwardRow([1], 0, [0], write=True, logits=True)])
    run = PagedRun(model)
    for tokens, start, table in (([1], 8, [0]), ([1], 0, [64]), ([], 0, [0])):
        with pytest.raises(ModelError, match="row 0"):
            model.run([ForwardRow(tokens, start, table, write=True, logits=True)])
    run.pool[:] = 0  # whatever is read counts for nothing, but the interpreter warns of NaN
    warm_up(model)
    assert not run.pool.any()


def test_a_gpu_that_fails_ends_the_process_and_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of stepper.ROW_FAILURES: row after row would fail, and the worker would live on."""
    run = PagedRun(load(make_checkpoint(tmp_path, "llama"), kernels="torch"))

    def fail(_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(TorchOperators, "start", lambda self, kv, rows: fail(rows))
    with pytest.raises(IntegrityError, match="cpu failed: CUDA error"):
        run.model.run([run.row(Sequence([1, 2]), 2)])


def test_kernels_need_a_gpu_or_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    monkeypatch.setattr(operators, "INTERPRETED", False)
    with pytest.raises(ModelError, match="needs a GPU"):
        load(folder, kernels="triton")
    with pytest.raises(ModelError, match="torch finds 0 GPUs"):
        load_model(FolderModel(str(folder), "float32", device="cuda:3"), 16, 1)
