"""The dtypes a model can run in, by the names of `engine.layout`."""

import torch

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = TORCH_DTYPES | {"int8": torch.int8}  # what KV can be stored in
