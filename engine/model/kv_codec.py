"""KV as values and as bytes of a page (engine/layout.py): written, read, and turned from one dtype into another.

int8 is symmetric: a vector x of K or V becomes q = round(x / s), s = max |x| / 127, so |q s - x| <= s / 2. What is not
finite stays so: its scale is NaN or infinite, and what is read with it is NaN, as a page of poison is (all ones: q = -1
and s = NaN). A vector depends on nothing but itself, so a block is the same bytes however its positions were chunked.

Shapes: M pages, P block_size, D head_dim.
"""

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from engine.layout import KVLayout
from engine.model.dtypes import KV_DTYPES

LARGEST = 127.0


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors [..., D] to int8 [..., D] and their scales, float32 [...]."""
    x = x.float()
    scale = x.abs().amax(dim=-1) / LARGEST
    q = x / torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
    return q.nan_to_num_(0.0).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scale


def open_pages(pages: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Values, float32 [M, P, D], of pages [M, page_bytes / item_bytes] in the layout's dtype."""
    count = layout.block_size * layout.head_dim
    values = pages[:, :count].view(-1, layout.block_size, layout.head_dim).float()
    if layout.scale_bytes:
        values *= pages[:, count:].view(torch.float32).unsqueeze(-1)
    return values


def close_pages(values_MPD: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Pages, uint8 [M, page_bytes], of values; rounded to the layout's dtype."""
    pages = len(values_MPD)
    if not layout.scale_bytes:
        return values_MPD.to(KV_DTYPES[layout.dtype]).reshape(pages, -1).view(torch.uint8)
    q_MPD, scale_MP = quantise(values_MPD)
    return torch.cat((q_MPD.reshape(pages, -1).view(torch.uint8), scale_MP.view(torch.uint8)), dim=1)


def convert(blocks: NDArray[np.uint8], source: str, layout: KVLayout) -> NDArray[np.uint8]:
    """Blocks [n, bytes] of a worker like this one, but with KV in dtype `source`, as [n, layout.block_bytes]."""
    theirs = dataclasses.replace(layout, dtype=source)
    pages = torch.from_numpy(blocks).view(-1, theirs.page_bytes).view(KV_DTYPES[source])
    converted: NDArray[np.uint8] = close_pages(open_pages(pages, theirs), layout).view(len(blocks), -1).numpy()
    return converted
