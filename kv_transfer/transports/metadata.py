"""What a reader must know of a holder before it can read, as it crosses from one worker to the other."""

from hashlib import blake2b

import msgspec

from cluster.core.errors import TransferError


class Metadata(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """NIXL's own metadata and what we add. Checked before NIXL sees them: given damaged bytes that name a live peer,
    NIXL fails and forgets the live one (measured).
    """

    agent: str
    pool_bytes: int  # how far a peer may read from our pool's address
    nixl: bytes
    digest: bytes
    device: int | None  # CUDA's number of the GPU that holds the pool; None: host memory

    @staticmethod
    def make(agent: str, pool_bytes: int, nixl: bytes, device: int | None) -> "Metadata":
        return Metadata(agent, pool_bytes, nixl, _digest(nixl), device)

    @staticmethod
    def parse(raw: bytes, peer: str) -> "Metadata":
        """Raises TransferError unless these are whole and those of `peer`."""
        try:
            metadata = msgspec.msgpack.decode(raw, type=Metadata)
        except msgspec.MsgspecError as error:
            raise TransferError(f"{len(raw)} bytes are not the metadata of an agent: {error}") from error
        if metadata.digest != _digest(metadata.nixl) or metadata.pool_bytes < 1:
            raise TransferError("the metadata are damaged")
        if metadata.agent != peer:
            raise TransferError(f"the metadata are those of {metadata.agent!r}")
        return metadata

    def pack(self) -> bytes:
        """The bytes that `parse` reads."""
        return msgspec.msgpack.encode(self)


def _digest(raw: bytes) -> bytes:
    return blake2b(raw, digest_size=8).digest()
