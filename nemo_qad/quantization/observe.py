"""What calibration sees beside ModelOpt's ranges: tokens of each expert, and X^T X of each linear's inputs.

S sequence, B micro-batch, D hidden, T tokens, I inputs of a linear on this rank, N = I / 16 blocks, K = 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_qad.models.placement import is_expert
from nemo_qad.quantization.nvfp4 import BLOCK_SIZE

CHUNK_TOKENS = 8192
# Added to the diagonal, in units of the layer's mean square input: inputs that calibration never moved still count.
DAMPING = 0.01


class Observer:
    """Counts and sums while calibration runs. `share` weighs what it sees: 1 / ranks where all see the same batch."""

    def __init__(self, module: nn.Module, hessians_of: list[str]) -> None:
        self.module = module
        self.share = 1.0
        self._counting = True
        device = next(module.parameters()).device
        experts = [n for n, _ in module.named_modules() if is_expert(n) and n.endswith(".linear_fc1")]
        self._tokens = {n.removesuffix(".linear_fc1"): torch.zeros((), dtype=torch.float64) for n in experts}
        self._sums = {
            name: torch.zeros(width // BLOCK_SIZE, BLOCK_SIZE, BLOCK_SIZE, dtype=torch.float64, device=device)
            for name in hessians_of
            for width in [module.get_parameter(f"{name}.weight").shape[-1]]
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, every forward of the module is observed."""
        hooks = [
            self.module.get_submodule(f"{name}.linear_fc1").register_forward_pre_hook(self._count(name))
            for name in self._tokens
        ] + [self.module.get_submodule(name).register_forward_pre_hook(self._add(name)) for name in self._sums]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def showing_all_tokens(self, idle: set[str]) -> Iterator[None]:
        """Inside, the experts named see every token of their layer, beside the routing, which stays as it is.

        Args:
            idle: local names; a layer with an idle expert on any rank must have one in the set of each rank, or the
                name of its expert list ("...mlp.experts.local_experts") where this rank has none.
        """
        layers = {name.rpartition(".experts.")[0] for name in idle}
        hooks = [
            self.module.get_submodule(layer).register_forward_pre_hook(
                self._show({name for name in idle if name.startswith(f"{layer}.") and name in self._tokens})
            )
            for layer in sorted(layers)
        ]
        self._counting = False
        try:
            yield
        finally:
            self._counting = True
            for hook in hooks:
                hook.remove()

    def expert_tokens(self) -> dict[str, float]:
        """Tokens that reached each expert of this rank, by local name; a collective call."""
        if not self._tokens:
            return {}
        counts = torch.stack(list(self._tokens.values()))
        groups: Any = self.module.pg_collection
        if groups.expt_dp.size() > 1:
            counts = _all_reduce(counts, groups.expt_dp, next(self.module.parameters()).device)
        return dict(zip(self._tokens, counts.tolist(), strict=True))

    def hessians(self) -> dict[str, Tensor]:
        """FP32 error weights [N, K, K] by linear, damped; a collective call. Linears that saw nothing are left out."""
        groups: Any = self.module.pg_collection
        found = {}
        for name, total in self._sums.items():
            for group in self._summed_over(name, groups):
                if group.size() > 1:
                    dist.all_reduce(total, group=group)
            mean_square = total.diagonal(dim1=-2, dim2=-1).mean()
            if mean_square > 0:
                unit = torch.eye(BLOCK_SIZE, dtype=total.dtype, device=total.device)
                found[name] = (total / mean_square + DAMPING * unit).float()
        return found

    def _summed_over(self, name: str, groups: Any) -> list[dist.ProcessGroup]:
        """Ranks that saw other tokens of the same inputs: data-parallel ones, and those of a split sequence.

        A row-parallel linear holds its own inputs on each tensor-parallel rank; a column-parallel one has all of
        them, of a part of the sequence or (experts) of all tokens, which counts them alike on each rank.
        """
        weight: Any = self.module.get_parameter(f"{name}.weight")
        data, tensor = (groups.expt_dp, groups.expt_tp) if is_expert(name) else (groups.dp_cp, groups.tp)
        return [data] if getattr(weight, "partition_dim", 0) == 1 else [data, tensor]

    def _count(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if self._counting:
                self._tokens[name] += inputs[0].shape[0] * self.share

        return hook

    def _add(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            for x_TI in inputs[0].detach().flatten(0, -2).split(CHUNK_TOKENS):
                x_NTK = x_TI.float().unflatten(1, (-1, BLOCK_SIZE)).transpose(0, 1)
                self._sums[name].add_(torch.bmm(x_NTK.transpose(1, 2), x_NTK), alpha=self.share)

        return hook

    def _show(self, experts: set[str]) -> Callable[..., None]:
        def hook(layer: Any, inputs: tuple[Tensor, ...]) -> None:
            tokens_TD = _gathered(inputs[0].detach().flatten(0, 1), self.module.pg_collection.tp_ep)  # type: ignore
            config = layer.config
            weight = (config.moe_router_topk_scaling_factor or 1.0) / config.moe_router_topk  # an average expert's
            for name in sorted(experts):
                expert = self.module.get_submodule(name)
                for part_TD in tokens_TD.split(CHUNK_TOKENS):
                    expert(part_TD, part_TD.new_full((len(part_TD),), weight, dtype=torch.float32))

        return hook


def _gathered(tokens_TD: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return tokens_TD
    parts = [torch.empty_like(tokens_TD) for _ in range(group.size())]
    dist.all_gather(parts, tokens_TD.contiguous(), group=group)
    return torch.cat(parts)


def _all_reduce(values: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    moved = values.to(device)
    dist.all_reduce(moved, group=group)
    return moved.cpu()
