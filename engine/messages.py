"""The engine socket: what a server tells its engine processes and what comes back (DESIGN §2).

The server decides, the engine obeys: it never allocates and never decides. Messages are msgspec structs, msgpack on the
wire, length-prefixed (engine/channel.py). Ids are small integers drawn by the server, unique within one engine's life.
Commands on one socket take effect in order, except Read / AddPeer / DropPeer / Serve, which the wire thread runs beside
the steps, and Prepare, which has a thread of its own.
"""

from typing import Literal

import msgspec

from cluster.core.faults import FaultSpec


class SampleSpec(msgspec.Struct, frozen=True, array_like=True):
    """Drawing one token from a row's logits. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 are off."""

    index: int  # sample index within the request (0..n-1); part of the noise counter
    seed: int  # unsigned 64 bit
    temperature: float
    top_p: float
    top_k: int
    logprobs: int  # -1: none; k >= 0: the drawn token's logprob and the k most likely ones
    min_p: float = 0.0


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What an answer must look like. `kind`: "json_object" (no source), "json_schema", "regex", "lark"."""

    kind: str
    source: str


class DrawRules(msgspec.Struct, frozen=True, array_like=True):
    """What earlier tokens have to say about a draw (engine/rules.py): the same for every sample of a request.

    `prompt_tokens`: where the prompt ends and what counts as written begins.
    """

    prompt_tokens: int
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None


class Start(msgspec.Struct, frozen=True, array_like=True):
    """A sequence draws under rules from here on. `history`: all its tokens up to the end of the row that says so."""

    rules: DrawRules
    history: list[int]


class Fill(msgspec.Struct, frozen=True, array_like=True):
    """A block whose last position this row writes; its digest comes back under the same generation."""

    block: int
    generation: int


class Score(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of given tokens: `targets[i]` by the logits of the row's position number `first` + i.

    Each beside the `top` most likely tokens there.
    """

    top: int
    first: int
    targets: list[int]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's share of a step: run `tokens` at positions `start`, `start + 1`, ...

    `tokens` None means one token: the one this engine last sampled for the sequence (with its first sample).
    `table_from` / `new_blocks`: the sequence's block table from that entry on (a delta; 0 replaces it whole).
    `write` False re-runs the position read-only: KV is already there and must not be written.
    `samples`: tokens to draw from the last position's logits; empty while a prompt is still being read.
    `start_rules`: with the first row that draws under rules. The rows after it go on from its last position, so what
    is behind a draw is known without being sent again.
    `score`: what to tell of the prompt's own tokens, where that was asked for.
    """

    sequence: int
    start: int
    tokens: list[int] | None
    table_from: int
    new_blocks: list[int]
    write: bool
    fills: list[Fill]
    samples: list[SampleSpec]
    start_rules: Start | None = None
    score: Score | None = None


class TracerModel(msgspec.Struct, frozen=True, tag="tracer"):
    """The weightless model (engine/model/tracer.py). `step_s` makes each step take at least that long."""

    vocab_size: int = 1024
    layers: int = 2
    kv_heads: int = 2
    max_context: int = 131_072
    step_s: float = 0.0
    token_s: float = 0.0  # added per token of the step


class FolderModel(msgspec.Struct, frozen=True, tag="folder"):
    """A Hugging Face folder. `dtype` is that of activations, and of weights that are not quantised.

    `kernels`, `quantization` and `device` as in EngineSettings. `kv_dtype`: what KV is stored in, "" for `dtype`;
    `converts_from`: what workers store it in whose blocks are converted when they are copied, "" for none.
    """

    path: str
    dtype: str
    max_context: int | None = None
    kernels: Literal["auto", "native", "torch", "triton"] = "auto"
    quantization: Literal["none", "int8", "int4"] = "none"
    device: str = "auto"
    kv_dtype: str = ""
    converts_from: str = ""


ModelSpec = TracerModel | FolderModel


class Init(msgspec.Struct, frozen=True, tag="init"):
    """First message, once. The engine loads the model, touches its memory and answers Ready, or Fatal."""

    agent: str  # name of the transfer agent: worker + epoch
    model: ModelSpec
    block_size: int
    num_blocks: int
    slots: int
    slot_bytes: int
    threads: int
    poison: bool  # fill every free block with NaN bytes: at start, and each block named in Poison
    transport: str  # "nixl" or "inprocess"
    transport_options: dict[str, str]
    faults: tuple[FaultSpec, ...] = ()


class Step(msgspec.Struct, frozen=True, tag="step"):
    """One numbered plan. `drop`: sequences whose state the engine may forget first."""

    plan: int
    rows: list[Row]
    drop: list[int]


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Read remote ranges (address, bytes) of `peer`, back to back, into staging slot `slot`."""

    id: int
    peer: str
    ranges: list[tuple[int, int]]
    slot: int


class Copy(msgspec.Struct, frozen=True, tag="copy"):
    """Copy whole blocks from the start of staging slot `slot` into pool blocks, and digest the copies.

    `source`: the KV dtype of what was read, where it is not this engine's own: it is converted after it was digested.
    """

    id: int
    slot: int
    blocks: list[int]
    source: str = ""


class Digest(msgspec.Struct, frozen=True, tag="digest"):
    """Digest blocks as they are in memory now (proof at use)."""

    id: int
    blocks: list[int]


class Poison(msgspec.Struct, frozen=True, tag="poison"):
    """Fill these freed blocks with NaN (only sent when Init.poison)."""

    blocks: list[int]


class AddPeer(msgspec.Struct, frozen=True, tag="add_peer"):
    """Make a remote agent known and warm the link with small reads of its pool. Answered by PeerAdded or PeerFailed.

    The holder must be polling (Serve) until then: a cold link is set up with its help, over any transport (measured).
    """

    peer: str
    metadata: bytes
    pool_address: int


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """Whether peers may be reading from here in a way that needs this side's help: link set-up, or TCP (measured)."""

    on: bool


class DropPeer(msgspec.Struct, frozen=True, tag="drop_peer"):
    peer: str


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Have this grammar ready before a row starts under it. Beside the steps; answered by Prepared."""

    id: int
    grammar: Grammar


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave in order."""


Command = Init | Step | Read | Copy | Digest | Poison | AddPeer | DropPeer | Serve | Prepare | Shutdown


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is loaded, its memory touched and registered."""

    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    vocab_size: int
    max_context: int
    eos_ids: list[int]
    fingerprint: bytes
    pool_address: int
    metadata: bytes
    transport: str
    load_s: float
    sources: dict[str, bytes] = {}  # fingerprints of those whose blocks are converted, by their KV dtype


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot go on; it exits after this."""

    reason: str


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """One drawn token. `top` holds (token id, logprob) of the most likely tokens when asked for."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


class FilledBlock(msgspec.Struct, frozen=True, array_like=True):
    block: int
    sequence: int
    generation: int
    digest: bytes


class Scored(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a Score of n targets, little-endian: float32 [n, 1 + top], int32 [n, top], int32 [n].

    `logprobs`: of the target, then of the most likely tokens `ids`; `ranks`: the target is the so many-th likeliest.
    """

    top: int
    logprobs: bytes
    ids: bytes
    ranks: bytes

    @property
    def rows(self) -> int:
        return len(self.ranks) // 4


class RowError(msgspec.Struct, frozen=True):
    """Why a row failed. `refused`: for what it asks, and any engine would; else this one could not run it."""

    reason: str
    refused: bool = False


class StepDone(msgspec.Struct, frozen=True, tag="step_done"):
    """`samples[i]` belongs to row i of the plan, one entry per SampleSpec. `errors`: rows that failed, by index.

    `scored`: the answers to the rows that have a Score, by index.
    """

    plan: int
    samples: list[list[Sampled]]
    filled: list[FilledBlock]
    errors: dict[int, RowError]
    seconds: float
    scored: dict[int, Scored] = {}


class ReadDone(msgspec.Struct, frozen=True, tag="read_done"):
    id: int
    seconds: float


class ReadFailed(msgspec.Struct, frozen=True, tag="read_failed"):
    """The read has ended and will not touch its slot again."""

    id: int
    reason: str


class CopyDone(msgspec.Struct, frozen=True, tag="copy_done"):
    """`digests`: of the bytes as they came. `converted`: of the blocks made of them, where the Copy has a `source`."""

    id: int
    digests: list[bytes]
    seconds: float
    converted: list[bytes] | None = None


class DigestDone(msgspec.Struct, frozen=True, tag="digest_done"):
    id: int
    digests: list[bytes]


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """`error`: why no row can start under this grammar; "" when one can."""

    id: int
    error: str


class PeerAdded(msgspec.Struct, frozen=True, tag="peer_added"):
    """The link is warm. `needs_polling`: later reads need the holder to poll too (TCP); measured on the warm link."""

    peer: str
    needs_polling: bool
    gb_per_s: float


class PeerFailed(msgspec.Struct, frozen=True, tag="peer_failed"):
    peer: str
    reason: str


Report = Ready | Fatal | StepDone | ReadDone | ReadFailed | CopyDone | DigestDone | Prepared | PeerAdded | PeerFailed
