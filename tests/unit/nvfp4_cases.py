"""Blocks for the NVFP4 tests: distributions of weights, and data made to sit on ties."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_qad.quantization import nvfp4, nvfp4_oracle

DISTRIBUTIONS = ("normal", "bf16", "uniform", "student_t", "adversarial")
# Where E2M1 rounds up, and the values themselves.
_POINTS = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0])


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)


def blocks(name: str, num_blocks: int, seed: int = 0) -> Tensor:
    """FP32 or BF16 [num_blocks / 4, 64]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks // 4, 64)
    if name == "uniform":
        return torch.rand(shape, generator=generator) * 2 - 1
    normal = torch.randn(shape, generator=generator)
    if name == "bf16":
        return (normal * 0.02).bfloat16()
    if name == "student_t":
        chi = sum(torch.randn(shape, generator=generator).square() for _ in range(4))
        return normal / (chi / 4).sqrt()
    return adversarial(num_blocks, generator) if name == "adversarial" else normal * 0.02


def adversarial(num_blocks: int, generator: torch.Generator) -> Tensor:
    """Elements on ties and on values of the scale that the block's amax gives, at most one bit beside them."""
    outer = torch.rand((), generator=generator) + 0.5
    byte = torch.randint(1, 121, (num_blocks,), generator=generator)
    byte[0] = 120  # 256, so that the largest element of all is `outer`
    step = nvfp4_oracle.E4M3[byte] * nvfp4.global_scale(outer, 256.0)
    points = _POINTS[torch.randint(0, len(_POINTS), (num_blocks, 16), generator=generator)]
    values = points * step[:, None]
    nudge = torch.randint(-1, 2, values.shape, generator=generator, dtype=torch.int32)
    values = torch.where(values > 0, (bits(values) + nudge).view(torch.float32), values)
    values[:, 0] = 6 * step
    values *= torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
    values[::7] = values[::7, :1]  # all alike
    values[::11, 1:] = 0
    values[::13] = 0
    values[::17] *= 2.0**-20  # below the smallest scale
    return values.view(num_blocks // 4, 64)
