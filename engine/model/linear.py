"""Matrix products with fixed weights."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F


class Linear:
    """y = x W^T + b. Several weights that read the same input are joined into one product.

    Shapes: T tokens, I inputs, O outputs of all joined weights.
    """

    def __init__(self, weights_OI: Sequence[torch.Tensor], biases_O: Sequence[torch.Tensor] = ()) -> None:
        self._weight_OI = weights_OI[0] if len(weights_OI) == 1 else torch.cat(list(weights_OI))
        self._bias_O = torch.cat(list(biases_O)) if biases_O else None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TI, self._weight_OI, self._bias_O)
