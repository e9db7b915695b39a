"""KV in int8, computed in float32: the same tokens on every path; and KV that a decode worker converts.

Transformers is no judge of these tokens, since rounding KV may change them: the paths judge each other. Between paths
only the chunks and the company in a step differ, and with them the last bits of a float32 sum; a value that lies just
between two steps of its scale may then be rounded to either.
"""

from pathlib import Path

import numpy as np
import pytest

from cluster.core.ids import agent_name
from cluster.stubs.session_pb2 import SampleState
from engine.model.kv_codec import convert
from tests.checkpoints import make_checkpoint
from tests.fakes.world import World
from tests.parity.lab import GREEDY, LOCAL, SAMPLINGS, TOKENS, Asked, B, Lab, end_quietly, prompt

LENGTHS = [1, B - 1, B, 2 * B + 5, 4 * B]
KINDS = ["llama", "qwen3", "mistral-window"]
INT8 = ("int8", "int8")
CONVERTED = ("float32", "int8")


def make_lab(kind: str, folder: Path, kv: tuple[str, str]) -> Lab:
    return Lab(kind, make_checkpoint(folder, kind, len(kind), max_position_embeddings=1024), kv=kv)


def moved(world: World, asked: Asked) -> int:
    """Positions whose KV came from a prefill worker."""
    handed_off = world.answers[asked.attempt].handed_off
    return int(handed_off.transferred_tokens) if handed_off else 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_on_every_path(kind: str, tmp_path: Path) -> None:
    """Split and local, in small and large chunks, from nothing and from the caches; alone and in company."""
    lab = make_lab(kind, tmp_path, INT8)
    known: dict[tuple[int, str], list[int]] = {}
    for chunk in (16, 512):
        for split in (True, False):
            world = lab.world(chunk_tokens=chunk)
            for cached in (False, True):
                prefill = None if split else LOCAL
                asked = {
                    (length, how): lab.ask(world, prompt(length, ord(how[0])), sampling, prefill=prefill)
                    for length in LENGTHS
                    for how, sampling in SAMPLINGS.items()
                }
                world.run()
                for (length, how), one in asked.items():
                    path = f"{'split' if split else 'local'}, chunk {chunk}, cached {cached}, length {length}, {how}"
                    [stream] = lab.collect(world, one, path)
                    assert stream == known.setdefault((length, how), stream), path
                    wanted = length // B * B if split else 0
                    assert moved(world, one) == (wanted - (length - 1) // B * B if cached and wanted else wanted), path
            end_quietly(world)


@pytest.mark.parametrize("split", [True, False], ids=["split", "local"])
def test_another_attempt_goes_on_with_the_same_tokens(split: bool, tmp_path: Path) -> None:
    """A failover onto a worker with nothing cached, one history shorter and one longer than a block."""
    lab, length, most = make_lab("llama", tmp_path, INT8), 2 * B + 5, B + 8
    first = lab.world()
    wholes = {how: lab.ask(first, prompt(length), SAMPLINGS[how], max_tokens=most) for how in SAMPLINGS}
    first.run()
    streams = {how: lab.collect(first, one, f"the whole, {how}", max_tokens=most)[0] for how, one in wholes.items()}
    again = lab.world()
    resumed = {
        (how, emitted): lab.ask(
            again,
            prompt(length),
            SAMPLINGS[how],
            max_tokens=most,
            history=[SampleState(emitted=streams[how][:emitted])],
            prefill=None if split else LOCAL,
        )
        for how in SAMPLINGS
        for emitted in (3, B + 2)
    }
    again.run()
    for (how, emitted), one in resumed.items():
        path = f"after {emitted} tokens, {how}"
        assert lab.collect(again, one, path, max_tokens=most) == [streams[how]], path
    end_quietly(again)


def test_samples_of_one_prompt_share_its_full_blocks(tmp_path: Path) -> None:
    """What follows the last full block is each sample's own: none writes into another's scales."""
    lab, length = make_lab("llama", tmp_path, INT8), 2 * B + 5
    world = lab.world()
    together = lab.ask(world, prompt(length), SAMPLINGS["seeded"], n=3)
    world.run()
    streams = lab.collect(world, together, "n=3")
    assert len({tuple(stream) for stream in streams}) == 3
    again = [SampleState(emitted=stream[:4]) for stream in streams]
    local = lab.ask(world, prompt(length), SAMPLINGS["seeded"], n=3, history=again, prefill=LOCAL)
    world.run()
    assert lab.collect(world, local, "n=3, again") == streams
    end_quietly(world)


def test_a_decode_worker_converts_what_it_has_proved(tmp_path: Path) -> None:
    """Offered and proved as the holder's bytes, kept as its own: matched again, and proved again, as such."""
    lab, length = make_lab("llama", tmp_path, CONVERTED), 4 * B + 5
    world = lab.world(prefill=2, decode=2)
    theirs, ours = (world.engines[name].memory for name in ("prefill-0", "decode-0"))
    assert (theirs.layout.dtype, ours.layout.dtype) == CONVERTED
    one = lab.ask(world, prompt(length), GREEDY)
    world.run()
    [stream] = lab.collect(world, one, "converted")
    handed_off = world.answers[one.attempt].handed_off
    assert world.answers[one.attempt].prefill_on == ["prefill-0"]
    assert (handed_off.transferred_tokens, handed_off.kv_bytes) == (4 * B, 4 * theirs.layout.block_bytes)
    held = {convert(each[None], "float32", ours.layout).tobytes() for each in theirs.pool if not _is_poison(each)}
    assert sum(each.tobytes() in held for each in ours.pool) == 4

    hit = lab.ask(world, prompt(length), GREEDY)
    other = lab.ask(world, prompt(length), GREEDY, decode="decode-1", prefill=["prefill-1"])
    world.run()
    assert lab.collect(world, hit, "converted, a hit") == lab.collect(world, other, "converted anew") == [stream]
    assert (moved(world, hit), moved(world, other)) == (0, 4 * B)
    end_quietly(world)


def test_what_is_converted_is_judged_as_it_came(tmp_path: Path) -> None:
    """A bit that flips on the way is found although what it becomes is proved by its own digest."""
    lab = make_lab("llama", tmp_path, CONVERTED)
    world = lab.world()
    engine, flipped = world.engines["decode-0"], list[int]()
    land = engine.land

    def bent(slot: int, at: int, sources: list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]) -> None:
        land(slot, at, sources)
        if not flipped:
            engine.memory.staging[slot, 3] ^= 8
            flipped.append(slot)

    engine.land = bent  # type: ignore[assignment, method-assign]
    one = lab.ask(world, prompt(4 * B + 5), GREEDY)
    world.run()
    lab.collect(world, one, "flipped once")
    assert len(world.answers[one.attempt].tokens[0]) == TOKENS
    counters = world.decode["decode-0"].state.counters
    assert (counters["digest_mismatch"], counters["kv_blocks_reread"]) == (1, 1)
    assert moved(world, one) == 4 * B
    end_quietly(world)


@pytest.mark.parametrize(("kv", "words"), [(("float32", "bfloat16"), "dtype"), (("bfloat16", "int8"), "fingerprint")])
def test_what_is_not_converted_does_not_pair(kv: tuple[str, str], words: str, tmp_path: Path) -> None:
    """Without the setting; and with it, when the other side's weights or arithmetic are not what they should be."""
    lab = make_lab("llama", tmp_path, kv)
    world = lab.world()
    identity = world.decode["decode-0"].state.facts.identity
    if words == "dtype":
        identity.sources.clear()
    else:
        identity.sources[kv[0]] = b"of other weights"
    one = lab.ask(world, prompt(4 * B + 5), GREEDY)
    world.run()
    peer = world.decode["decode-0"].peers.get(agent_name("prefill-0", 1))
    assert peer is not None
    assert peer.reason.startswith(words)
    assert (world.answers[one.attempt].prefill_on[-1], moved(world, one)) == ("local", 0)
    assert lab.collect(world, one, "local after all")


def _is_poison(block: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bool:
    return bool((block == 0xFF).all())
