"""Block keys: the chained hash that names a block's content (DESIGN §4.2).

key(i) = blake2b-128 over (format version, parent key, token ids of block i); the root parent is a hash over
(format version, fingerprint, adapter, tenant salt). Every variable-length field is length-prefixed, so no two
different inputs share an encoding (FAULTS C33). Python's `hash` is never used: it differs between processes (C35).
"""

import hashlib
import struct
from array import array
from collections.abc import Iterator, Sequence

FORMAT_VERSION = 1
KEY_BYTES = 16

BlockKey = bytes
KEYS_PER_MESSAGE = 2048  # of cache events: a router needs about 2 ms to take them in


def root_key(fingerprint: bytes, *, adapter: str = "", salt: bytes = b"") -> BlockKey:
    """The parent of a sequence's first block: everything but the tokens that changes KV bytes or who may share them."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"headrace-root")
    digest.update(struct.pack("<I", FORMAT_VERSION))
    for part in (fingerprint, adapter.encode(), salt):
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()


def child_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """The key of the block that holds `token_ids` after the block named `parent`."""
    packed = array("q", token_ids)
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"headrace-block")
    digest.update(struct.pack("<IQ", FORMAT_VERSION, len(packed)))
    digest.update(parent)
    digest.update(packed.tobytes())
    return digest.digest()


class KeyChain:
    """The keys of one sequence's full blocks, extended as its tokens grow."""

    def __init__(self, root: BlockKey, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self.keys: list[BlockKey] = []

    def extend(self, token_ids: Sequence[int]) -> list[BlockKey]:
        """Derive the keys of all full blocks of `token_ids` (the whole sequence, from position 0). Returns `keys`."""
        while (end := (len(self.keys) + 1) * self._block_size) <= len(token_ids):
            parent = self.keys[-1] if self.keys else self._root
            self.keys.append(child_key(parent, token_ids[end - self._block_size : end]))
        return self.keys


def pack_keys(keys: Sequence[BlockKey], most: int = KEYS_PER_MESSAGE) -> Iterator[bytes]:
    """The keys one after the other, KEY_BYTES each, in pieces of at most `most` keys. Nothing for no keys."""
    for start in range(0, len(keys), most):
        yield b"".join(keys[start : start + most])
