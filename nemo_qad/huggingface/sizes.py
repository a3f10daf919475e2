"""How large an export will be, and how an engine would cut it, from the configuration alone: no tensor is made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_qad.huggingface.engines import Weight
from nemo_qad.huggingface.mapping import Shape
from nemo_qad.huggingface.names import carried, mappings
from nemo_qad.quantization.nvfp4 import BLOCK_SIZE
from nemo_qad.quantization.recipes import formats
from nemo_qad.schema import Format, KvFormat, ModelConfig, RecipeConfig


@dataclass(frozen=True)
class Size:
    """`num_bytes` of all tensors in the files, without their headers of about 100 bytes a tensor."""

    num_bytes: int
    num_tensors: int
    num_values: int

    @property
    def bits(self) -> float:
        """Bits a weight, everything counted."""
        return 8 * self.num_bytes / self.num_values


def export_size(model: ModelConfig, recipe: RecipeConfig | None) -> Size:
    """Of the export of a model by a recipe, or of its BF16 checkpoint; what is not quantised in BF16.

    The bias of a router is FP32, as in every published checkpoint.
    """
    table = {} if recipe is None else formats(recipe, model)
    num_bytes = num_tensors = num_values = 0
    for mapping in [*mappings(model), *carried(model)]:
        linear = table.get(mapping.mcore.removesuffix(".weight"))
        for name, shape in zip(mapping.hf, mapping.shapes, strict=True):
            chosen = linear.format if linear else Format.bf16
            wide = mapping.is_fp32 or name.endswith("e_score_correction_bias")
            size, count = _stored(shape, chosen, 4 if wide else 2)
            num_bytes, num_tensors, num_values = num_bytes + size, num_tensors + count, num_values + math.prod(shape)
    if recipe is not None and recipe.kv_cache != KvFormat.none:
        scales = 2 * model.hybrid_pattern.count("*")
        num_bytes, num_tensors = num_bytes + 4 * scales, num_tensors + scales
    return Size(num_bytes, num_tensors, num_values)


def _stored(shape: Shape, chosen: Format, width: int) -> tuple[int, int]:
    """(bytes, tensors): NVFP4 half a byte, a byte for each block, and FP32 for the tensor; FP8 a byte and two FP32.

    The inputs of W4A4 have an FP32 of their own."""
    values = math.prod(shape)
    if chosen.has_blocks:
        inputs = int(chosen.covers_inputs)
        return values // 2 + values // BLOCK_SIZE + 4 + 4 * inputs, 3 + inputs
    if chosen is Format.fp8:
        return values + 8, 3
    return width * values, 1


def quantised_weights(model: ModelConfig, recipe: RecipeConfig) -> dict[str, Weight]:
    """The quantised linears of an export by Hugging Face name, as `engines.cut_problems` takes them."""
    table, found = formats(recipe, model), {}
    for mapping in mappings(model):
        linear = table.get(mapping.mcore.removesuffix(".weight"))
        if linear is None or linear.format is Format.bf16:
            continue
        for name, (rows, columns) in zip(mapping.hf, mapping.shapes, strict=True):
            found[name.removesuffix(".weight")] = Weight(rows, columns, linear.format.has_blocks)
    return found
