"""What a request used, counted once and reported the same way on every path (FAULTS C31, C32)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `completion` includes each sample's ending token; `cached`: prompt positions that nobody computed."""

    prompt: int
    completion: int
    cached: int
