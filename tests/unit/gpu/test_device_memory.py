"""A GPU's memory as an engine uses it, on the CPU and in Triton's interpreter: the same contract as HostMemory."""

import pytest
import torch

from cluster.core.clock import ManualClock
from cluster.core.digest import digest_block
from cluster.core.errors import ConfigError, IntegrityError, TransferError
from engine.gpu.memory import SPARE_BYTES, DeviceMemory, check_segments
from engine.layout import KVLayout
from engine.wire import address_of
from kv_transfer.transports.inprocess import InProcessNetwork, InProcessTransport

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=4, block_size=4, dtype="float32")
SIZE = LAYOUT.block_bytes


def memory(blocks: int = 6, slots: int = 2, slot_bytes: int = 3 * SIZE + 8) -> DeviceMemory:
    return DeviceMemory(LAYOUT, blocks, slots, slot_bytes, torch.device("cpu"))


def test_a_transport_hears_where_everything_is() -> None:
    mem = memory()
    assert (mem.pool.shape, len(mem.pool), mem.pool.nbytes) == ((6, SIZE), 6, 6 * SIZE)
    assert mem.pool_address == address_of(mem.pool) == mem.blocks.data_ptr()
    slots, slot_bytes = mem.staging.shape
    assert (slots, slot_bytes % 256, mem.staging.spare) == (2, 0, SPARE_BYTES)
    assert slot_bytes >= 3 * SIZE + 8
    assert address_of(mem.staging, 1) == address_of(mem.staging) + slot_bytes


def test_blocks_are_taken_from_the_start_of_the_slot_and_proved() -> None:
    mem = memory()
    mem.poison_all()
    slot = mem._slots[1]
    slot.copy_(torch.arange(len(slot)).to(torch.uint8))
    digests = mem.take(1, [5, 0])
    assert torch.equal(mem.blocks[5], slot[:SIZE])
    assert torch.equal(mem.blocks[0], slot[SIZE : 2 * SIZE])
    assert mem.blocks[1:5].view(torch.float32).isnan().all()
    assert digests == [digest_block(mem.blocks[b].numpy(), 2) for b in (5, 0)] == mem.digests([5, 0])
    mem.poison([5])
    assert mem.blocks[5].view(torch.float32).isnan().all()
    assert mem.digests([0]) == digests[1:]
    assert mem.take(0, []) == mem.digests([]) == []


@pytest.mark.parametrize("block", [-1, 6])
def test_blocks_that_do_not_exist_are_refused(block: int) -> None:
    mem = memory()
    for call in (lambda: mem.poison([block]), lambda: mem.digests([block]), lambda: mem.take(0, [block])):
        with pytest.raises(IntegrityError, match="does not exist"):
            call()


@pytest.mark.parametrize(("slot", "blocks"), [(-1, [0]), (2, [0]), (0, [0, 1, 2, 3])])
def test_slots_that_do_not_fit_are_refused(slot: int, blocks: list[int]) -> None:
    with pytest.raises(IntegrityError, match="cannot hold"):
        memory().take(slot, blocks)


@pytest.mark.parametrize(("blocks", "slots", "slot_bytes"), [(0, 1, SIZE), (1, 0, SIZE), (1, 1, SIZE - 1)])
def test_impossible_sizes_are_the_operators_fault(blocks: int, slots: int, slot_bytes: int) -> None:
    with pytest.raises(ConfigError):
        memory(blocks, slots, slot_bytes)


def test_memory_that_peers_could_not_read_is_refused() -> None:
    plain: dict[str, object] = {"address": 1000, "total_size": 100, "is_expandable": False}
    expandable: dict[str, object] = {"address": 2000, "total_size": 100, "is_expandable": True}
    check_segments([plain, expandable], [1000, 1099, 2100])
    with pytest.raises(ConfigError, match="expandable_segments"):
        check_segments([plain, expandable], [1000, 2099])


def test_memory_of_a_gpu_does_not_travel_within_a_process() -> None:
    mem = memory()
    with pytest.raises(TransferError, match="must be nixl"):
        InProcessTransport(InProcessNetwork(), "a", ManualClock()).register(mem.pool, mem.staging)
