"""Matrix products with fixed weights."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

# Measured on one core with AMX, at 1 to 256 input rows: a weight reordered for this many rows is never slower than one
# reordered for few, and a quarter to a third faster than F.linear, which reorders the weight on every call.
_PACKED_FOR_ROWS = 256


class Linear:
    """y = x W^T + b. Several weights that read the same input are joined into one product.

    Where oneDNN has fast bfloat16 the weight is kept in oneDNN's own order, once; the plain copy is let go.
    Shapes: T tokens, I inputs, O outputs of all joined weights.
    """

    def __init__(self, weights_OI: Sequence[torch.Tensor], biases_O: Sequence[torch.Tensor] = ()) -> None:
        weight_OI = weights_OI[0] if len(weights_OI) == 1 else torch.cat(list(weights_OI))
        self._bias_O = torch.cat(list(biases_O)) if biases_O else None
        self._packed = _can_pack(weight_OI)
        if self._packed:
            weight_OI = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _PACKED_FOR_ROWS)
        self._weight_OI = weight_OI

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O], T at least 1."""
        if not self._packed:
            return F.linear(x_TI, self._weight_OI, self._bias_O)
        out_TO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self._weight_OI, self._bias_O, "none", [], "")
        return out_TO


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
