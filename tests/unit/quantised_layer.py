"""One linear with ModelOpt's quantizers, for the tests of the seam."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nemo_qad.quantization import modelopt

STATIC = {-1: 16, "type": "static", "scale_bits": (4, 3)}
DYNAMIC = {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}
NVFP4_STATIC = {"num_bits": (2, 1), "block_sizes": STATIC}
NVFP4_DYNAMIC = {"num_bits": (2, 1), "block_sizes": DYNAMIC, "type": "dynamic"}
FP8 = {"num_bits": (4, 3), "axis": None}


def quantised(
    weight_cfg: dict[str, Any], input_cfg: dict[str, Any] | None = None, algorithm: Any = "max"
) -> Any:
    torch.manual_seed(5)
    layer = nn.Sequential(nn.Linear(64, 48, bias=False))
    rules: list[dict[str, Any]] = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "0.weight_quantizer", "cfg": weight_cfg},
    ]
    if input_cfg:
        rules.append({"quantizer_name": "0.input_quantizer", "cfg": input_cfg})
    modelopt.insert_quantizers(layer, rules)
    modelopt.calibrate(layer, algorithm, lambda: layer(inputs()))
    return layer


def inputs() -> Tensor:
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(9))


def raw_weight(layer: Any) -> Tensor:
    return layer[0]._parameters["weight"].detach()
