"""A whole hand-off through the kernels of engine/gpu, in Triton's interpreter: the reference's tokens on every path."""

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.parity.lab import GREEDY, LOCAL, SEEDED, B, Lab, end_quietly, prompt
from tests.verify_record import Report


@pytest.mark.verify
@pytest.mark.parametrize("architecture", ["qwen3", "mistral-window"])
def test_split_and_local_write_the_references_tokens(architecture: str, tmp_path: Path, report: Report) -> None:
    lab, tokens = Lab(architecture, make_checkpoint(tmp_path, architecture), kernels="triton"), 4
    world = lab.world(chunk_tokens=24)
    asked = {
        (where, length): lab.ask(
            world,
            prompt(length),
            SEEDED if length % 2 else GREEDY,
            max_tokens=tokens,
            prefill=LOCAL if where == "local" else None,
        )
        for where in ("split", "local")
        for length in (5, 2 * B, 3 * B + 7)
    }
    world.run()
    for (where, length), one in asked.items():
        lab.collect(world, one, f"triton, {where}, length {length}", max_tokens=tokens)
    lab.ledger.settle()
    end_quietly(world)
    report(f"triton, {architecture}: {lab.ledger.figures}")
