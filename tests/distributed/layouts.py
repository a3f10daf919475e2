"""A small hybrid model in any tensor- and expert-parallel layout, with the weights of one rank's model."""

from __future__ import annotations

from typing import Any

import torch
from ranks import Results
from torch import Tensor

from nemo_qad import runtime
from nemo_qad.models.build import build_model
from nemo_qad.models.placement import Pieces, Placement, is_expert, pieces
from nemo_qad.schema import AttentionConfig, MambaConfig, ModelConfig, MoeConfig, ParallelConfig, Precision

SEQUENCE = 16
ONE = ParallelConfig(name="one")
LAYOUTS = {
    "tp2": ParallelConfig(name="tp2", ranks_per_node=2, tensor=2),
    "ep2": ParallelConfig(name="ep2", ranks_per_node=2, expert=2),
    "tp2_ep2": ParallelConfig(name="tp2_ep2", ranks_per_node=2, tensor=2, expert=2),
    "dp2": ParallelConfig(name="dp2", ranks_per_node=2),
    "etp2": ParallelConfig(name="etp2", ranks_per_node=2, tensor=2, expert_tensor=2),
    "tp4": ParallelConfig(name="tp4", ranks_per_node=4, tensor=4),
    "dp4": ParallelConfig(name="dp4", ranks_per_node=4),
    "dp4_ep2": ParallelConfig(name="dp4_ep2", ranks_per_node=4, expert=2),
    "cp2": ParallelConfig(name="cp2", ranks_per_node=2, context=2),
    "pp2": ParallelConfig(name="pp2", ranks_per_node=2, pipeline=2),
    "tp2_cp2": ParallelConfig(name="tp2_cp2", ranks_per_node=4, tensor=2, context=2),
    "tp2_pp2": ParallelConfig(name="tp2_pp2", ranks_per_node=4, tensor=2, pipeline=2),
    "cp2_pp2": ParallelConfig(name="cp2_pp2", ranks_per_node=4, context=2, pipeline=2),
    "pp2_dp2_ep2": ParallelConfig(name="pp2_dp2_ep2", ranks_per_node=4, pipeline=2, expert=2),
    "cp4": ParallelConfig(name="cp4", ranks_per_node=4, context=4),
}


def hybrid(**changes: Any) -> ModelConfig:
    """ME*M-: every kind of layer, of sizes that four tensor-parallel ranks divide into blocks."""
    fields: dict[str, Any] = {
        "name": "small",
        "hybrid_pattern": "ME*M-",
        "hidden_size": 64,
        "vocab_size": 500,
        "max_position_embeddings": 64,
        "ffn_hidden_size": 128,
        "precision": Precision.fp32,
        "init_std": 0.1,
        "attention": AttentionConfig(num_heads=4, num_query_groups=4, head_dim=16),
        "mamba": MambaConfig(num_heads=4, head_dim=16, num_groups=4, state_dim=16, chunk_size=16),
        "moe": MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=48, shared_expert_ffn_hidden_size=64),
    }
    return ModelConfig(**{**fields, **changes})


def cut(module: Any, name: str, parameter: Tensor) -> Pieces | None:
    groups = module.pg_collection
    return pieces(parameter, groups.expt_tp if is_expert(name) else groups.tp)


def build(model: ModelConfig, parallel: ParallelConfig, weights: Results | None = None, seed: int = 1) -> Any:
    """A model with fresh weights, or with this rank's part of `weights` (global name -> whole tensor)."""
    runtime.set_seeds(seed)
    module = build_model(model, parallel, sequence_length=SEQUENCE).eval()
    placement = Placement(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters() if weights else ():
            whole, pieces_ = weights[placement.global_name(name)], cut(module, name, parameter)
            parameter.copy_(pieces_.own(whole) if pieces_ else whole)
    return module


def weights_of(module: Any) -> Results:
    """Global name -> whole parameter, as far as this rank's experts go; a collective call."""
    placement, found = Placement(module), {}
    for name, parameter in module.named_parameters():
        pieces_ = cut(module, name, parameter)
        whole = pieces_.whole(parameter.detach()) if pieces_ else parameter.detach()
        found[placement.global_name(name)] = whole.clone()
    return found


def batches(model: ModelConfig, count: int, size: int = 2, seed: int = 11) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shape = (size, SEQUENCE)
    return [{"tokens": torch.randint(0, model.vocab_size, shape, generator=generator)} for _ in range(count)]
