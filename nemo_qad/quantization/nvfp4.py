"""NVFP4 numerics in plain torch: what fake quantisation computes is what the packed bytes decode to.

A tensor is cut into blocks of K = 16 along its last dimension. An element is stored as an E2M1 code
(0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), a block as an E4M3 scale, a tensor as one FP32 scale:

    value = e2m1 * (block_scale * global_scale)              each product rounded to FP32, in this order
    global_scale = max(global_amax, 2^-100) / (6 * scale_max)
    block_scale  = e4m3(clamp(block_amax * scale_max / global_amax, 2^-9, 448))

`scale_max` is 448, the largest E4M3 value, or 256 for four-over-six, which leaves room to enlarge a
block's scale by 1.5. The clamp from below is why training and export agree on blocks that are zero or
underflow: they keep the smallest positive scale, so no stored scale is zero, and none is ever NaN (0x7F).
Codes of -0 are never made: what rounds to zero is +0.

Both paths, `fake_quantize` and `pack`, share `_round_in_steps`, and a decoder multiplies in the order
above, so decode(pack(w)) == fake_quantize(w) bit for bit in FP32, on CPU and GPU alike.

Rounding here is arithmetic on the bits of FP32 numbers. `nvfp4_oracle.py` says the same by comparing with the eight
values and is what the tests hold this module to, bit for bit. Four-over-six for whole tensors is in
`nvfp4_fast.py`, other choices of scale in `nvfp4_search.py`.

NaN and infinity have no stored form: `pack` and every choice of scales refuse them. `fake_quantize`, which runs in
each forward, lets NaN through to the loss.

Shapes: O rows, I columns, N = O * I / 16 blocks of K = 16 elements. Imports torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_SIZE = 16
E2M1_MAX = 6.0
NUM_INDICES_SHOWN = 3
CPU_CHUNK_BLOCKS = 2**14  # 1 MiB of FP32
GPU_CHUNK_BLOCKS = 2**20
E4M3_MAX = 448.0
FOUR_OVER_SIX_SCALE_MAX = 256.0
MIN_BLOCK_SCALE = 2.0**-9  # smallest positive E4M3
MIN_GLOBAL_AMAX = 2.0**-100  # keeps every product of scales a normal FP32 number
HUGE_GLOBAL_AMAX = 2.0**100  # beyond it amax * scale_max could overflow: both sides are made smaller first

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BITS = 0x7F800000
_ONE_BITS = 0x3F800000
_ROUNDER_BITS = (22 << 23) | (1 << 22)  # adds 22 to an FP32 exponent and sets its first fraction bit


@dataclass(frozen=True)
class PackedTensor:
    """What ships. codes uint8 [..., I/2], even column in the low nibble; block_scale float8_e4m3fn
    [..., I/16]; global_scale FP32 scalar."""

    codes: Tensor
    block_scale: Tensor
    global_scale: Tensor


def block_amax(tensor: Tensor) -> Tensor:
    """Largest magnitude of each block: [..., I] of any floating type -> FP32 [..., I/16]."""
    amax = blocks(tensor.detach()).abs().amax(-1).float()
    return amax.view(*tensor.shape[:-1], tensor.shape[-1] // BLOCK_SIZE)


def global_scale(global_amax: Tensor, scale_max: float = E4M3_MAX) -> Tensor:
    """FP32 scalar by which the block scales are multiplied (`weight_scale_2` of a checkpoint)."""
    return _safe_global_amax(global_amax) / (E2M1_MAX * scale_max)


def block_scale(amax: Tensor, global_amax: Tensor, scale_max: float = E4M3_MAX) -> Tensor:
    """E4M3 scale of each block (`weight_scale` of a checkpoint), in the shape of `amax`.

    amax * scale_max is formed first: it is exact for BF16 weights, so that ties round as they should.
    A block larger than global_amax saturates at 448; a dynamic scale never meets that case.
    """
    outer = _safe_global_amax(global_amax)
    shrink = torch.where(outer > HUGE_GLOBAL_AMAX, 2.0**-20, 1.0).float()  # a power of two: no rounding
    scale = (amax.float() * (scale_max * shrink)) / (outer * shrink)
    return scale.clamp_(MIN_BLOCK_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)


def fake_quantize(tensor: Tensor, amax: Tensor, global_amax: Tensor, scale_max: float = E4M3_MAX) -> Tensor:
    """Values that the packed bytes of `tensor` decode to.

    Args:
        tensor: [..., I], any floating type.
        amax: block amax of calibration, or of `tensor` itself; FP32 with N elements in any shape.
        global_amax: FP32 scalar.

    Returns:
        FP32, in the shape of `tensor`.
    """
    step = block_scale(amax, global_amax, scale_max).float().mul_(global_scale(global_amax, scale_max)).view(-1, 1)
    blocks_NK = blocks(tensor.detach())
    values_NK = torch.empty(blocks_NK.shape, dtype=torch.float32, device=tensor.device)
    for chunk in _chunks(blocks_NK):
        torch.mul(_round_in_steps(blocks_NK[chunk], step[chunk]), step[chunk], out=values_NK[chunk])
    return values_NK.view(tensor.shape)


def fake_quantize_dynamic(tensor: Tensor) -> Tensor:
    """As `fake_quantize`, with block amax and global amax taken from `tensor` itself."""
    amax = block_amax(tensor)
    return fake_quantize(tensor, amax, amax.amax())


def pack(tensor: Tensor, amax: Tensor, global_amax: Tensor, scale_max: float = E4M3_MAX) -> PackedTensor:
    """Stored form of `tensor`; arguments as for `fake_quantize`.

    Raises:
        ValueError: NaN or infinity in the tensor or in its amax, or a last dimension that blocks do not divide.
    """
    check_finite(tensor)
    check_finite(amax, "a block amax")
    check_finite(global_amax, "a global amax")
    scale = block_scale(amax, global_amax, scale_max)
    outer = global_scale(global_amax, scale_max)
    step, blocks_NK = scale.float().mul_(outer).view(-1, 1), blocks(tensor.detach())
    codes_NJ = torch.empty(len(blocks_NK), BLOCK_SIZE // 2, dtype=torch.uint8, device=tensor.device)
    for chunk in _chunks(blocks_NK):
        codes_nK = encode(_round_in_steps(blocks_NK[chunk], step[chunk]))
        torch.bitwise_or(codes_nK[:, 0::2], codes_nK[:, 1::2] << 4, out=codes_NJ[chunk])
    scales = scale.view(*tensor.shape[:-1], tensor.shape[-1] // BLOCK_SIZE)
    return PackedTensor(codes_NJ.view(*tensor.shape[:-1], tensor.shape[-1] // 2), scales, outer.reshape(()))


def decode(packed: PackedTensor) -> Tensor:
    """FP32 [..., I] values of a packed tensor."""
    codes = torch.stack((packed.codes & 0xF, packed.codes >> 4), dim=-1).flatten(-2)
    table = torch.tensor(_E2M1_MAGNITUDES, device=codes.device)
    values = torch.cat((table, -table))[codes.long()]
    step = packed.block_scale.float() * packed.global_scale
    return (blocks(values) * step.reshape(-1, 1)).view(codes.shape)


def encode(values: Tensor) -> Tensor:
    """uint8 code of each E2M1 value: sign in bit 3, magnitude's index in bits 0..2."""
    return magnitude_index(values.abs()).add_(values < 0, alpha=8).to(torch.uint8)


def magnitude_index(magnitude: Tensor) -> Tensor:
    """Index 0..7, as FP32, of E2M1 magnitudes v: the least of three lines, 2v up to 2, v + 2 up to 4, v / 2 + 4."""
    return torch.minimum(magnitude * 2, torch.minimum(magnitude + 2, (magnitude * 0.5).add_(4)))


def rounder(quotient: Tensor) -> Tensor:
    """FP32 number whose addition and subtraction rounds a quotient in [-6, 6] to E2M1, ties to even; a new tensor.

    E2M1 has one fraction bit from 1 up and the fixed step 0.5 below. Adding and subtracting
    1.5 * 2^22 * 2^e, where 2^e = max(1, binade of |q|), rounds q to a multiple of 2^e / 2 by the FP32
    adder itself: five passes over the data and no comparison with the eight values.
    """
    binade = quotient.view(torch.int32).bitwise_and(_EXPONENT_BITS)
    return binade.clamp_(min=_ONE_BITS).add_(_ROUNDER_BITS).view(torch.float32)


def four_over_six_amax(tensor: Tensor, global_amax: Tensor) -> Tensor:
    """Block amax with the four-over-six choice folded in: FP32 [..., I/16].

    Each block tries its largest element at 6 and at 4 (its amax enlarged by 1.5), both with their scale
    rounded to E4M3, and keeps the one with the lower sum of squared errors; equal errors keep 6
    (Cook et al., "Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling").
    """
    from nemo_qad.quantization.nvfp4_fast import four_over_six  # which builds on this module

    return four_over_six(tensor, global_amax).amax


def check_finite(tensor: Tensor, what: str = "a tensor") -> None:
    """Raises ValueError that says how many elements of `tensor` are NaN or infinite, and where the first are."""
    if torch.stack(tensor.aminmax()).isfinite().all():  # NaN is both the least and the largest
        return
    bad = ~torch.isfinite(tensor)
    count = int(bad.sum())
    shape = list(tensor.shape)
    first = ", ".join(str(index.tolist()) for index in bad.nonzero()[:NUM_INDICES_SHOWN])
    more = " ..." if count > NUM_INDICES_SHOWN else ""
    raise ValueError(
        f"NVFP4 has no NaN and no infinity, and {count} of the {tensor.numel()} elements of {what} of shape {shape} "
        f"are one or the other: at {first}{more}"
    )


def _safe_global_amax(global_amax: Tensor) -> Tensor:
    return global_amax.float().clamp(min=MIN_GLOBAL_AMAX)


def blocks(tensor: Tensor) -> Tensor:
    """View [N, 16] of [..., I]. Raises ValueError naming I where blocks do not divide it."""
    width = tensor.shape[-1] if tensor.dim() else 1
    if width % BLOCK_SIZE:
        raise ValueError(
            f"NVFP4 needs a last dimension in multiples of {BLOCK_SIZE}, not {width} (shape {list(tensor.shape)})"
        )
    return tensor.reshape(-1, BLOCK_SIZE)


def _chunks(blocks_NK: Tensor) -> Iterator[slice]:
    """Blocks that are worked on at a time: temporaries stay in a core's cache, and small beside the tensor."""
    size = GPU_CHUNK_BLOCKS if blocks_NK.is_cuda else CPU_CHUNK_BLOCKS
    for start in range(0, len(blocks_NK), size):
        yield slice(start, start + size)


def _round_in_steps(blocks_nK: Tensor, step_n1: Tensor) -> Tensor:
    """E2M1 values of blocks in units of their steps: new FP32 [n, 16], round to nearest even."""
    q = blocks_nK.float() / step_n1
    q.clamp_(-E2M1_MAX, E2M1_MAX)
    constant = rounder(q)
    return q.add_(constant).sub_(constant)
