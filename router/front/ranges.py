"""What numbers may be: the table that bounds.py checks by and that the OpenAPI document shows (openapi/limits.py)."""

from dataclasses import dataclass
from functools import lru_cache

from cluster.core.config import RouterSettings
from cluster.core.errors import InvalidRequest

SEED_MASK = (1 << 64) - 1
INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Range:
    """From `low` to `high`, both included unless `above`: then `low` is not."""

    low: int
    high: int
    above: bool = False

    def check(self, param: str, value: float | None) -> None:
        """Raises InvalidRequest unless `value` is None or in this range; NaN is in no range."""
        if value is None or (self.low <= value <= self.high and not (self.above and value == self.low)):
            return
        words = f"above {self.low} and at most {self.high}" if self.above else f"{self.low} to {self.high}"
        raise InvalidRequest(f"{param} must be {words}", param=param)

    @property
    def schema(self) -> dict[str, int]:
        """In JSON Schema's words."""
        return {"exclusiveMinimum" if self.above else "minimum": self.low, "maximum": self.high}


BIAS = Range(-100, 100)  # of each entry of logit_bias


def ranges(settings: RouterSettings) -> dict[str, Range]:
    """Field of an `Ask` -> its range. Not to be changed: every request is checked by the same ones."""
    return _ranges(settings.max_n, settings.max_logprobs)


@lru_cache
def _ranges(max_n: int, max_logprobs: int) -> dict[str, Range]:
    return {
        "temperature": Range(0, 2),
        "top_p": Range(0, 1, above=True),
        "top_k": Range(-1, INT32_MAX),
        "n": Range(1, max_n),
        "max_tokens": Range(0, INT32_MAX),  # 0 where the prompt is answered with: bounds.py
        "logprobs": Range(0, max_logprobs),
        "prompt_logprobs": Range(0, max_logprobs),
        "seed": Range(-(1 << 63), SEED_MASK),
        "presence_penalty": Range(-2, 2),
        "frequency_penalty": Range(-2, 2),
        "repetition_penalty": Range(0, 100, above=True),
        "min_p": Range(0, 1),
        "min_tokens": Range(0, INT32_MAX),
        "priority": Range(-1000, 1000),  # a lower one goes first, as with vLLM; 0 is what says nothing
    }
