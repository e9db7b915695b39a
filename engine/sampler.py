"""One sampler for prefill, decode and the tracer: the same logits give the same token wherever they are drawn (I5).

1. Rules, where a request has any (engine/rules.py): grammar and min_tokens forbid, then logit_bias, then repetition,
   frequency and presence penalty.
2. Greedy (temperature 0): the largest logit, the lowest id among equals.
3. Otherwise temperature; then min-p, which keeps tokens at least min_p times as likely as the likeliest; then top-k;
   then top-p over what is left, where the token that crosses p is kept. Equal logits are ordered by token id.
4. Draw by Gumbel-max: argmax over the kept tokens of (logit - max) / temperature + g, with noise from engine/noise.py.
5. Log-probabilities are those of the raw model: log-softmax of the logits as they came, before any of the above.

A row of NaN or of infinite logits raises ValueError; `sample` names the row.
Shapes: V vocabulary, R rows, n kept tokens.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.messages import Sampled, SampleSpec
from engine.noise import SCALE, exponential, noise_bits, noise_bits_at, noise_key

FloatsV = NDArray[np.float32]
IdsN = NDArray[np.int64]

# top-p sorts only the tokens at least this likely relative to the likeliest: the first tier that holds the mass.
_TIERS = (1e-2, 1e-4, 1e-6, 0.0)


class BadLogits(ValueError):
    """Logits that are not finite at their maximum: nothing can be drawn from them."""


def sample(
    logits: NDArray[np.float32], specs: Sequence[Sequence[SampleSpec]], positions: Sequence[int]
) -> list[list[Sampled]]:
    """Draw from `logits` [R, V]: one token per spec of each row. `positions[r]`: absolute position of the drawn token.

    Raises ValueError, naming the row, for logits that are not finite at their maximum and for impossible specs.
    """
    results = []
    for row, (row_specs, position) in enumerate(zip(specs, positions, strict=True)):
        try:
            results.append(sample_row(logits[row], row_specs, position))
        except ValueError as error:
            raise ValueError(f"row {row}: {error}") from error
    return results


def sample_row(
    logits_V: FloatsV, specs: Sequence[SampleSpec], position: int, shaped_V: FloatsV | None = None
) -> list[Sampled]:
    """Draw one token per spec from one row's logits [V]; `shaped_V`: the same under the request's rules.

    Raises BadLogits, and ValueError for rules that leave nothing and for an impossible spec.
    """
    raw_peak = _peak(logits_V, int(logits_V.argmax()))
    from_V = logits_V if shaped_V is None else shaped_V
    best = int(from_V.argmax())
    peak = raw_peak if shaped_V is None else _peak(shaped_V, best, ValueError)
    raw_norm: float | None = None
    results = []
    for spec in specs:
        _check(spec, len(logits_V))
        token = best if spec.temperature == 0 else _draw(from_V, peak, spec, position)
        if spec.logprobs < 0:
            results.append(Sampled(token, None, []))
            continue
        if raw_norm is None:
            raw_norm = _norm(logits_V, raw_peak)
        top = [(int(i), float(logits_V[i]) - raw_norm) for i in _largest(logits_V, spec.logprobs)]
        results.append(Sampled(token, float(logits_V[token]) - raw_norm, top))
    return results


def score_row(logits_V: FloatsV, token: int, top: int) -> tuple[float, NDArray[np.float64], IdsN, int]:
    """What raw logits [V] say of a token: its log-probability, those and the ids of the `top` likeliest, its rank.

    Rank 1 is the most likely token; equals rank by id, as they are listed. Raises ValueError for bad logits.
    """
    norm = _norm(logits_V, _peak(logits_V, int(logits_V.argmax())))
    own = logits_V[token]
    before = np.count_nonzero(logits_V > own) + np.count_nonzero(logits_V[:token] == own)
    ids_n = _largest(logits_V, top)
    return float(own) - norm, logits_V[ids_n].astype(np.float64) - norm, ids_n, 1 + int(before)


def _norm(logits_V: FloatsV, peak: float) -> float:
    """What a logit's log-probability lacks: the logarithm of the sum of all likelihoods."""
    return peak + math.log(np.exp(logits_V - np.float32(peak)).sum(dtype=np.float64))


def _peak(logits_V: FloatsV, best: int, error: type[ValueError] = BadLogits) -> float:
    """The largest logit. Raises `error` when it is not finite; argmax finds the first NaN when there is one."""
    if not math.isfinite(peak := float(logits_V[best])):
        raise error(f"the largest logit is {peak}")
    return peak


def _check(spec: SampleSpec, vocab: int) -> None:
    if not 0 <= spec.temperature < math.inf:  # False for NaN too
        raise ValueError(f"temperature is {spec.temperature}")
    if not 0 < spec.top_p <= 1 or not 0 <= spec.min_p <= 1:
        raise ValueError(f"top_p is {spec.top_p}, min_p is {spec.min_p}")
    if not 0 <= spec.seed < 1 << 64:
        raise ValueError(f"seed {spec.seed} is not an unsigned 64-bit number")
    if spec.top_k < 0 or spec.index < 0:
        raise ValueError(f"top_k is {spec.top_k}, index is {spec.index}")
    if spec.logprobs > vocab:
        raise ValueError(f"{spec.logprobs} logprobs of a vocabulary of {vocab}")


def _draw(logits_V: FloatsV, peak: float, spec: SampleSpec, position: int) -> int:
    key = noise_key(spec.seed, spec.index, position)
    kept_n = _kept(logits_V, peak, spec)
    if kept_n is None:
        return _race(logits_V, peak, spec.temperature, key)
    return _gumbel_max(logits_V, peak, spec.temperature, kept_n, noise_bits_at(key, kept_n))


def _scaled(logits: FloatsV, peak: float, temperature: float) -> NDArray[np.float64]:
    """(logit - max) / temperature: 0 for the likeliest, negative for the others."""
    with np.errstate(over="ignore"):  # a tiny temperature sends the others to minus infinity, as it should
        return (logits.astype(np.float64) - peak) / temperature


def _likelihoods(logits_V: FloatsV, peak: float, temperature: float) -> FloatsV:
    """exp((logit - max) / temperature): 1 for the likeliest."""
    with np.errstate(over="ignore"):
        likelihoods_V: FloatsV = np.exp((logits_V - np.float32(peak)) / np.float32(max(temperature, 1e-30)))
    return likelihoods_V


def _kept(logits_V: FloatsV, peak: float, spec: SampleSpec) -> IdsN | None:
    """The tokens that min-p, top-k and top-p leave, most likely first; None when all are off."""
    top_k = spec.top_k if 0 < spec.top_k < len(logits_V) else 0
    if spec.min_p > 0:
        likely_n = np.flatnonzero(_scaled(logits_V, peak, spec.temperature) >= math.log(spec.min_p))
        kept_n = likely_n[np.argsort(-logits_V[likely_n], kind="stable")][: top_k or None]
        return kept_n if spec.top_p == 1 else _top_p(logits_V, peak, spec, kept_n)
    if top_k:
        kept_n = _largest(logits_V, top_k)
        return kept_n if spec.top_p == 1 else _top_p(logits_V, peak, spec, kept_n)
    if spec.top_p == 1:
        return None
    weights_V = _likelihoods(logits_V, peak, spec.temperature)
    mass = spec.top_p * float(weights_V.sum(dtype=np.float64))
    for tier in _TIERS:
        kept_n = np.flatnonzero(weights_V >= tier)
        weights_n = weights_V[kept_n].astype(np.float64)
        if tier == 0 or float(weights_n.sum()) >= mass:
            break
    order_n = np.argsort(-logits_V[kept_n], kind="stable")  # ids rise in kept_n, so equals stay in order of id
    return _nucleus(kept_n[order_n], weights_n[order_n], mass)


def _top_p(logits_V: FloatsV, peak: float, spec: SampleSpec, kept_n: IdsN) -> IdsN:
    """The nucleus of some tokens, most likely first."""
    weights_n = np.exp(_scaled(logits_V[kept_n], peak, spec.temperature))
    return _nucleus(kept_n, weights_n, spec.top_p * float(weights_n.sum()))


def _nucleus(kept_n: IdsN, weights_n: NDArray[np.float64], mass: float) -> IdsN:
    """The shortest prefix whose weights reach `mass`; all of it when rounding keeps the sum just below."""
    return kept_n[: int(np.searchsorted(np.cumsum(weights_n), mass)) + 1]


def _largest(logits_V: FloatsV, k: int) -> IdsN:
    """Ids of the k largest logits, largest first, equals by id. A selection, then a sort of what it leaves."""
    if k == 0:
        return np.empty(0, np.int64)
    threshold = np.partition(logits_V, len(logits_V) - k)[len(logits_V) - k]
    ids_n = np.flatnonzero(logits_V >= threshold)  # with every equal of the k-th: the id decides, not the selection
    return ids_n[np.argsort(-logits_V[ids_n], kind="stable")][:k]


def _gumbel_max(logits_V: FloatsV, peak: float, temperature: float, ids_n: IdsN, bits_n: NDArray[np.uint32]) -> int:
    scores_n = _scaled(logits_V[ids_n], peak, temperature) - np.log(exponential(bits_n))
    return int(ids_n[scores_n == scores_n.max()].min())


def _race(logits_V: FloatsV, peak: float, temperature: float, key: int) -> int:
    """Gumbel-max over the whole vocabulary without a logarithm per token, and with the same result.

    Gumbel-max is a race: the smallest E / weight wins. As E = -log(1 - v) >= v, no token with v / weight above the
    E / weight of some other token can win. So take the token with the smallest v / weight, and let only those race that
    may beat it.
    """
    weights_V = _likelihoods(logits_V, peak, temperature)
    bits_V = noise_bits(key, len(logits_V))
    ratios_V = bits_V.astype(np.float32)
    ratios_V += np.float32(0.5)
    with np.errstate(divide="ignore", over="ignore"):  # weight 0: cannot win, and infinity says so
        ratios_V /= weights_V
    first = int(ratios_V.argmin())
    bound = float(exponential(bits_V[first : first + 1])[0]) / SCALE / float(weights_V[first])
    with np.errstate(over="ignore"):
        ids_n = np.flatnonzero(ratios_V <= np.float32(bound * 1.001))  # 1.001: the float32 above is good to 1e-5
    return _gumbel_max(logits_V, peak, temperature, ids_n, bits_V[ids_n])
