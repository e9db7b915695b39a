"""Rotary position embedding (Su et al. 2021) in the rotate-half convention of Hugging Face, with its scalings.

Everything is float32 (the angles of far positions need it) and computed for the positions of a step: no table.
"""

import math

import torch

from engine.model.config import RopeConfig


class Rope:
    """cos and sin for positions. Shapes: T tokens, H heads, D head_dim."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | None = None) -> None:
        """`device`: where positions come from and angles are wanted; None: the CPU."""
        frequencies_, self._scale = frequencies(config, head_dim)
        self._frequencies = frequencies_.to(device or "cpu")

    def angles(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin, both float32 [T, 1, D]; the first half of the sin is negated (see `rotate`)."""
        angle = positions_T[:, None, None].to(torch.float32) * self._frequencies
        cos, sin = angle.cos() * self._scale, angle.sin() * self._scale
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x_THD: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x cos + rotate_half(x) sin, in float32, returned in x's dtype. The sign of rotate_half is in the sin."""
    cos, signed_sin = angles
    swapped = x_THD.roll(x_THD.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_THD * cos, swapped.float(), signed_sin).to(x_THD.dtype)


def frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per position, float32 [head_dim / 2], and the factor on cos and sin."""
    plain = 1.0 / (config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match config.kind:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / config.factor, 1.0
        case "llama3":
            return _llama3(config, plain), 1.0
        case "yarn":
            scale = config.attention_factor
            if scale is None:
                scale = 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0
            return _yarn(config, plain, head_dim), scale


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long wavelengths are divided by factor, short ones kept, those between interpolated."""
    turns = config.original_context * plain / (2 * math.pi)  # in the original context
    smooth = ((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)).clamp(0, 1)
    return (1 - smooth) * plain / config.factor + smooth * plain


def _yarn(config: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """YaRN (Peng et al. 2023), "NTK-by-parts": a linear ramp over dimensions between the two correction bounds."""

    def dimension(turns: float) -> float:
        length = config.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp may not be a step: division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / config.factor * ramp
