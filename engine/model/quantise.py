"""Weights of products in 8 or 4 bits: what a value becomes, for torch and native code alike.

One scale per output and group of 64 inputs. int8: values -127 to 127. int4: -8 to 7, the largest value of a group at -8
(as llama.cpp's Q4_0), and 8 bits for the logits. Embeddings, norms and biases stay as they are. Native code multiplies
whole numbers and rounds the other side of a product, the activations, to 8 bits by the same groups; torch multiplies in
the model's dtype.

Shapes: O outputs, I inputs, G groups of 64 inputs.
"""

from typing import Literal

import torch

Quantization = Literal["none", "int8", "int4"]
GROUP = 64
_NARROWER = (0.93, 0.86, 0.79)
BITS: dict[Quantization, int] = {"none": 16, "int8": 8, "int4": 4}
HEAD_BITS: dict[Quantization, int] = {"none": 16, "int8": 8, "int4": 8}  # logits are the most sensitive


def quantise(weight_OI: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [O, I] and scales float32 [O, G]. A value is about q x scale."""
    outputs, inputs = weight_OI.shape
    groups = torch.nn.functional.pad(weight_OI.float(), (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    q, scale = _round(groups, largest.abs() / 127, (-127, 127)) if bits == 8 else _best_of_4_bits(groups, largest / -8)
    return q.to(torch.int8).view(outputs, -1)[:, :inputs].contiguous(), scale.squeeze(2)


def _round(groups: torch.Tensor, scale: torch.Tensor, bounds: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    return (groups / torch.where(scale == 0, 1.0, scale)).round_().clamp_(*bounds), scale


def _best_of_4_bits(groups: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cutting off a group's largest values may cost less than coarse steps for all: the smallest squared error wins."""
    best_q, best_scale = _round(groups, scale, (-8, 7))
    best_error = (best_q * scale - groups).square_().sum(dim=2, keepdim=True)
    for factor in _NARROWER:
        q, narrower = _round(groups, scale * factor, (-8, 7))
        error = (q * narrower - groups).square_().sum(dim=2, keepdim=True)
        better = error < best_error
        best_q = torch.where(better, q, best_q)
        best_scale = torch.where(better, narrower, best_scale)
        best_error = torch.where(better, error, best_error)
    return best_q, best_scale


def rounded(weight_OI: torch.Tensor, bits: int) -> torch.Tensor:
    """What is left of a weight, in its own dtype: for code that multiplies in that dtype."""
    if bits == 16:
        return weight_OI
    q_OI, scale = quantise(weight_OI, bits)
    every = scale.repeat_interleave(GROUP, dim=1)[:, : q_OI.shape[1]]
    return (q_OI * every).to(weight_OI.dtype)
