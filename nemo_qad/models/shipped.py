"""In which dtype a tensor of a model ships: that of the checkpoint it came from, kept as a mark on the tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def set_shipped_dtype(tensor: Tensor, dtype: torch.dtype) -> None:
    marked: Any = tensor
    marked.shipped_dtype = dtype


def shipped_dtype(tensor: Tensor, default: torch.dtype = torch.bfloat16) -> torch.dtype:
    """`default` for a tensor without a mark, as in a model that no checkpoint filled."""
    found: torch.dtype = getattr(tensor, "shipped_dtype", default)
    return found
