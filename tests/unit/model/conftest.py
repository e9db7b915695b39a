"""Checkpoints and reference logits are made once per test run: making them is most of these tests' time."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.checkpoints import make_checkpoint, reference_logits, reference_model

Reference = Callable[[Path, list[int]], NDArray[np.float32]]
Checkpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """`checkpoint(architecture, **overrides)`: a folder, shared by all tests. Never write into it."""
    made: dict[str, Path] = {}

    def make(architecture: str, **overrides: object) -> Path:
        name = repr((architecture, sorted(overrides.items())))
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp(architecture), architecture, 0, **overrides)
        return made[name]

    return make


@pytest.fixture(scope="session")
def reference() -> Reference:
    """`reference(folder, tokens)`: what transformers computes, [len(tokens), vocabulary]."""
    models = {}

    def compute(folder: Path, tokens: list[int]) -> NDArray[np.float32]:
        if folder not in models:
            models[folder] = reference_model(folder)
        logits: NDArray[np.float32] = reference_logits(models[folder], tokens).numpy()
        return logits

    return compute
