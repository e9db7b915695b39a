"""The judge of parity: what transformers, in float32, says about every token we wrote (DESIGN I5).

    1. `Ledger.add`   one stream of tokens under what should determine it: the prompt and how it is drawn
    2. compare        a stream that is not the same as an earlier one under the same key is a fork: allowed only where
                      the two tokens it begins with are within EPSILON of each other in the reference
    3. judge          each distinct stream: one transformers forward over prompt + output; every token must be the best
                      one there or within EPSILON of it, or it is an exception
    4. bound          exceptions and forks together are at most MAX_SHARE of the tokens judged

The score of a token is what the sampler maximises, in the unit of logits: `logit + temperature * gumbel noise` over
what top-k and top-p leave, so a greedy token's score is its logit. It is written here a second time, plainly, over the
reference's logits; only the noise itself comes from the product.

Shapes: V vocabulary, N tokens of one output.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from engine.messages import SampleSpec
from engine.noise import exponential, noise_bits, noise_key

EPSILON = 1e-3
"""In logits. Two float32 implementations differ by about 1e-5; a margin below this decides nothing."""
MAX_SHARE = 0.001
GREEDY = SampleSpec(index=0, seed=0, temperature=0.0, top_p=1.0, top_k=0, logprobs=-1)

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """What one sample wrote after a prompt."""

    prompt: Tokens
    spec: SampleSpec
    output: Tokens
    path: str  # how it came about, for people


@dataclass(frozen=True, slots=True)
class Fork:
    """Two streams of one key that differ from output token `at` on."""

    one: Stream
    other: Stream
    at: int


@dataclass(slots=True)
class Figures:
    """What was checked so far."""

    streams: int = 0  # added, all paths
    tokens: int = 0  # in them
    judged: int = 0  # tokens of distinct streams, each judged once
    close_calls: int = 0  # judged tokens that are not the best, but within EPSILON
    narrow: int = 0  # judged tokens whose two best scores are within EPSILON: either one would have been right
    smallest_margin: float = math.inf  # between the two best scores, over all judged tokens
    largest_gap: float = 0.0  # between the best score and that of a judged token
    exceptions: int = 0
    forks: int = 0
    findings: list[str] = field(default_factory=list)  # every exception and fork, in words

    def __str__(self) -> str:
        return (
            f"{self.streams} streams, {self.tokens} tokens, {self.judged} of them distinct and judged; "
            f"{self.exceptions} exceptions, {self.close_calls} close calls, {self.forks} forks; "
            f"{self.narrow} margins below {EPSILON:g}, the smallest {self.smallest_margin:.2g}; "
            f"largest gap {self.largest_gap:.2g}"
        )


class Ledger:
    """Every stream of one model, by what should determine it."""

    def __init__(self, reference: PreTrainedModel, *, batch_positions: int = 8192) -> None:
        """`batch_positions`: prompt and output positions that the reference runs in one forward, padding included."""
        self._reference = reference
        self._batch_positions = batch_positions
        self._known: dict[tuple[Tokens, SampleSpec], list[Stream]] = {}
        self._unjudged: list[Stream] = []
        self._forks: list[Fork] = []
        self.figures = Figures()

    def add(self, prompt: Sequence[int], spec: SampleSpec, output: Sequence[int], path: str) -> None:
        """Note one stream. Nothing is decided before `settle`."""
        if spec.temperature == 0:
            spec = GREEDY  # neither the seed nor the index of the sample may matter
        stream = Stream(tuple(prompt), spec, tuple(output), path)
        self.figures.streams += 1
        self.figures.tokens += len(output)
        known = self._known.setdefault((stream.prompt, spec), [])
        if any(stream.output == other.output for other in known):
            return
        if known and (fork := _fork(known[0], stream)) is not None:
            self._forks.append(fork)
        known.append(stream)
        self._unjudged.append(stream)

    def settle(self) -> None:
        """Judge what is new. AssertionError when more is wrong than may be."""
        figures, forks = self.figures, self._forks
        judged, found = figures.judged, len(figures.findings)
        self.judge()
        wrong_forks = [text for fork in forks if (text := self._judge_fork(fork)) is not None]
        assert not wrong_forks, "paths disagree where the reference does not waver:\n" + "\n".join(wrong_forks)
        new = figures.findings[found:]
        assert len(new) <= (figures.judged - judged) * MAX_SHARE, "more exceptions than may be:\n" + "\n".join(new)

    def judge(self) -> None:
        """Judge what is new, without a verdict: for what is only reported."""
        streams, self._unjudged, self._forks = self._unjudged, [], []
        for stream, scores_NV in self._scores(streams):
            self.figures.judged += len(stream.output)
            self._judge(stream, scores_NV)

    def _judge(self, stream: Stream, scores_NV: NDArray[np.float64]) -> None:
        figures = self.figures
        two_best_N2 = np.sort(np.partition(scores_NV, -2, axis=1)[:, -2:], axis=1)
        margins_N = two_best_N2[:, 1] - two_best_N2[:, 0]
        gaps_N = two_best_N2[:, 1] - scores_NV[np.arange(len(stream.output)), list(stream.output)]
        figures.narrow += int((margins_N < EPSILON).sum())
        figures.smallest_margin = min(figures.smallest_margin, float(margins_N.min()))
        figures.largest_gap = max(figures.largest_gap, float(gaps_N.max()))
        figures.close_calls += int(((gaps_N > 0) & (gaps_N < EPSILON)).sum())
        for at in np.flatnonzero(~(gaps_N < EPSILON)):  # a NaN is an exception too
            figures.exceptions += 1
            figures.findings.append(
                f"{stream.path}: {len(stream.prompt)} prompt tokens, {stream.spec}: output token {at} is "
                f"{stream.output[at]}, {gaps_N[at]:.3g} behind {int(scores_NV[at].argmax())}"
            )

    def _judge_fork(self, fork: Fork) -> str | None:
        """Report a fork that the reference excuses; returns the text of one that it does not."""
        one, other, at = fork.one, fork.other, fork.at
        ((_, scores_NV),) = self._scores([one])
        margin = abs(float(scores_NV[at, one.output[at]] - scores_NV[at, other.output[at]]))
        text = (
            f"{one.path} and {other.path}: {len(one.prompt)} prompt tokens, {one.spec}: output token {at} is "
            f"{one.output[at]} or {other.output[at]}, {margin:.3g} apart"
        )
        if not margin < EPSILON:
            return text
        self.figures.forks += 1
        self.figures.findings.append(text)
        return None

    def _scores(self, streams: Sequence[Stream]) -> Iterator[tuple[Stream, NDArray[np.float64]]]:
        """The reference's score of every token at every output position: [N, V] per stream."""
        for batch in _batches(streams, self._batch_positions):
            # Padding on the right: in a causal model no position sees what comes after it.
            inputs = [list(s.prompt + s.output[:-1]) for s in batch]
            width = max(len(ids) for ids in inputs)
            padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in inputs])
            first = min(len(s.prompt) for s in batch) - 1
            with torch.inference_mode():
                logits = self._reference(padded, logits_to_keep=width - first, use_cache=False).logits
            for row, stream in enumerate(batch):
                start = len(stream.prompt) - 1 - first
                logits_NV = logits[row, start : start + len(stream.output)].double().numpy()
                yield stream, _sampler_scores(logits_NV, stream)


def _fork(one: Stream, other: Stream) -> Fork | None:
    for at, (a, b) in enumerate(zip(one.output, other.output, strict=False)):
        if a != b:
            return Fork(one, other, at)
    return None  # one is longer, and goes on from the other


def _batches(streams: Sequence[Stream], positions: int) -> Iterator[list[Stream]]:
    """Streams of similar length together, up to `positions` after padding; a longer one alone."""
    batch: list[Stream] = []
    for stream in sorted(streams, key=lambda s: len(s.prompt) + len(s.output)):
        if batch and (len(batch) + 1) * (len(stream.prompt) + len(stream.output)) > positions:
            yield batch
            batch = []
        batch.append(stream)
    if batch:
        yield batch


def _sampler_scores(logits_NV: NDArray[np.float64], stream: Stream) -> NDArray[np.float64]:
    """`logit + temperature * noise`, minus infinity for what top-k and top-p cut: [N, V]."""
    spec = stream.spec
    if spec.temperature == 0:
        return logits_NV
    scores_NV = np.full_like(logits_NV, -np.inf)
    for n, logits_V in enumerate(logits_NV):
        kept = _kept(logits_V, spec)
        bits_V = noise_bits(noise_key(spec.seed, spec.index, len(stream.prompt) + n), len(logits_V))
        scores_NV[n, kept] = logits_V[kept] - spec.temperature * np.log(exponential(bits_V[kept]))
    return scores_NV


def _kept(logits_V: NDArray[np.float64], spec: SampleSpec) -> NDArray[np.int64]:
    """Ids that top-k and then top-p leave, the one that crosses p included."""
    ids = np.argsort(-logits_V, kind="stable")
    if spec.top_k:
        ids = ids[: spec.top_k]
    weights = np.exp((logits_V[ids] - logits_V[ids[0]]) / spec.temperature)
    before = np.cumsum(weights) - weights
    kept: NDArray[np.int64] = ids[before < spec.top_p * weights.sum()]
    return kept
