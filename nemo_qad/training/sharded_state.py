"""A trainer's state as Megatron's sharded tensors: each rank writes its parts, any layout reads them.

Keys are Megatron's own: a parameter's key holds its main values in FP32 (who loads a model from there gets weights),
`optimizer.state.exp_avg.KEY` and `optimizer.state.exp_avg_sq.KEY` Adam's moments, `average.KEY` the moving average,
`quantizer.NAME` frozen scales, `rng.NAME` random states, a row for each rank. How a tensor is cut (over tensor, expert
and pipeline ranks, Mamba's pieces) is Megatron's knowledge, taken from `sharded_state_dict` of the model.

Data-parallel replicas take turns: parameter number n is written by replica n mod R. With the distributed optimizer the
owner collects the flat parts of the others, so each holds and writes an R-th of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor, nn

from nemo_qad import agreement
from nemo_qad.models.placement import expert_biases, is_expert
from nemo_qad.training.main_parameters import MainPart, chained
from nemo_qad.training.trained import ADAM, Trained

Load = Callable[[dict[str, Any]], None]  # fills the sharded tensors of a dictionary; a collective call


class ShardedState:
    """Of one trainer, on all ranks together."""

    def __init__(self, trained: Trained) -> None:
        self._module, self._main, self._optimizer = trained.module, trained.main, trained.optimizer
        self._average, self._weights, self._adam = trained.average, trained.weights, trained.adam

    def to_save(self, truth: Callable[[str], Tensor]) -> dict[str, Any]:
        """What this rank writes, by keys that no other entry of it has; a collective call.

        Tensors are the trainer's own where they can be: whoever writes them later must do so from a fork or a copy.

        Args:
            truth: this rank's main values of a parameter of which it has a part.
        """
        with self._weights.as_modelopt_has_them() if self._weights else nullcontext():
            templates = self._module.sharded_state_dict()  # type: ignore[operator]
        state: dict[str, Any] = {}
        adam = self._adam()
        for kind in self._kinds():
            for name, whole in self._owned(kind, truth, adam):
                state |= _sharded(kind, templates[name], whole, owner=True)
        for name, buffer in expert_biases(self._module).items():
            state |= _sharded("", templates[name], buffer, owner=False)
        if self._weights:
            state |= self._weights.sharded_scales()
            state |= self._for_modelopt(templates)
        return state | _random_states(save=True)

    @torch.no_grad()
    def restore(self, load: Load, updates: int, kept: dict[str, Tensor], *, same_ranks: bool) -> None:
        """The inverse of `to_save`; parameters are left latent, their other parts not yet gathered. A collective call.

        Args:
            load: of the checkpoint.
            updates: how often Adam has stepped.
            kept: the truth about weights quantised in place in FP32, which is part of the state.
            same_ranks: as many ranks wrote the checkpoint, so each has a random state of its own there.
        """
        templates = self._module.sharded_state_dict()  # type: ignore[operator]
        owner = {
            id(p): o.optimizer for o in chained(self._optimizer) for g in o.optimizer.param_groups for p in g["params"]
        }
        for part in self._main.parts.values():
            # Every parameter has a step of its own: a shared tensor would be advanced by each of them.
            owner[id(part.values)].state[part.values] = {"step": torch.tensor(float(updates))}
        for kind in self._kinds():
            for name, own in self._own_parts(kind, templates, load):
                part = self._main.parts[name]
                if kind in ADAM:
                    owner[id(part.values)].state[part.values][kind] = own.to(part.values.device).clone()
                elif kind == "average":
                    self._average[name].copy_(own)
                else:
                    part.values.copy_(own)
                    part.write(part.values)
                    if name in kept:
                        kept[name].copy_(own)
        wanted: dict[str, Any] = {}
        for name, buffer in expert_biases(self._module).items():
            wanted |= _sharded("", templates[name], buffer, owner=True)
        load(wanted)
        if self._weights:
            self._weights.load_scales(load)
        states = _random_states(save=False, same_ranks=same_ranks)
        load(states)
        _set_random_states(states)

    def _kinds(self) -> list[str]:
        return ["main", *ADAM, *(["average"] if self._average else [])]

    def _values(self, kind: str, name: str, part: MainPart, truth: Callable[[str], Tensor], adam: Any) -> Tensor:
        if kind == "main":
            return truth(name)
        return self._average[name] if kind == "average" else adam[id(part.values)][kind]

    def _owned(self, kind: str, truth: Callable[[str], Tensor], adam: Any) -> Iterator[tuple[str, Tensor]]:
        """(local name, FP32 values in the shape of this rank's parameter) of the parameters whose turn this rank is."""
        for number, (name, parameter) in enumerate(self._module.named_parameters()):
            group = self._main.group(expert=is_expert(name))
            turn, part = number % group.size(), self._main.parts.get(name)
            if self._main.is_distributed and group.size() > 1:
                flat = None if part is None else self._values(kind, name, part, truth, adam)
                whole = _collected(flat, 0 if part is None else part.start, parameter, group, turn)
                if group.rank() == turn:
                    yield name, whole
            elif group.rank() == turn:
                assert part is not None
                yield name, self._values(kind, name, part, truth, adam).detach().view(parameter.shape)

    def _own_parts(self, kind: str, templates: dict[str, Any], load: Load) -> Iterator[tuple[str, Tensor]]:
        """(local name, values in the shape of the main part) of one kind, from the checkpoint; a collective call."""
        parameters = dict(self._module.named_parameters())
        whole = {name: torch.zeros(parameters[name].shape, dtype=torch.float32) for name in self._main.parts}
        wanted: dict[str, Any] = {}
        for name, value in whole.items():
            wanted |= _sharded(kind, templates[name], value, owner=True)
        load(wanted)
        for name, value in whole.items():
            part = self._main.parts[name]
            flat = value.reshape(-1)[part.start : part.start + part.values.numel()]
            yield name, flat.view(part.values.shape)

    def _for_modelopt(self, templates: dict[str, Any]) -> dict[str, Any]:
        """ModelOpt's own entries, by which its tools read the scales; on layouts where they are what it reads."""
        if not is_readable_by_modelopt(self._module):
            return {}
        parameters, biases = dict(self._module.named_parameters()), expert_biases(self._module)
        own = {name: item for name, item in templates.items() if name not in parameters and name not in biases}
        kinds = ShardedTensor | ShardedObject
        return {f"modelopt.{name}": item for name, item in own.items() if isinstance(item, kinds)}


def is_readable_by_modelopt(module: nn.Module) -> bool:
    """Whether ModelOpt's entries can be written: it cuts neither static block scales nor scales by expert."""
    groups: Any = module.pg_collection
    return all(group.size() == 1 for group in (groups.tp, groups.ep, groups.expt_tp))


def _prefixed(kind: str, key: str) -> str:
    return {"main": key, "": key, "average": f"average.{key}"}.get(kind, f"optimizer.state.{kind}.{key}")


def _sharded(kind: str, template: Any, whole: Tensor, *, owner: bool) -> dict[str, ShardedTensor]:
    """Sharded tensors over the memory of `whole`, cut as the template's tensor is.

    Args:
        owner: of all data-parallel replicas this one answers for the tensor; otherwise as the template says.
    """
    replica = template.replica_id
    if owner:
        replica = (*replica[:-1], 0) if isinstance(replica, tuple) else 0
    key = _prefixed(kind, template.key)
    if isinstance(template, ShardedTensorFactory):
        built = template.build_fn(key, whole, replica, None)
        return {_entry(item): item for item in nested_values(built)}
    item = replace(template, key=key, data=whole, dtype=whole.dtype, replica_id=replica)
    return {_entry(item): item}


def _entry(item: ShardedTensor) -> str:
    """Experts of one rank share a key and differ in their offset."""
    return f"{item.key}@{'.'.join(map(str, item.global_offset))}"


def _collected(
    flat: Tensor | None, start: int, like: Tensor, group: dist.ProcessGroup, turn: int
) -> Tensor:
    """FP32 [as `like`] of the flat parts that the ranks of `group` have, on the one whose turn it is; collective."""
    whole = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
    if flat is not None:
        whole[start : start + flat.numel()] = flat.detach().view(-1)
    dist.reduce(whole, dist.get_global_rank(group, turn), group=group)  # each number is one rank's: no sum is rounded
    return whole.view(like.shape)


def _random_states(*, save: bool, same_ranks: bool = True) -> dict[str, Any]:
    """`rng.NAME` [ranks, bytes] of torch's generator and of Megatron's for each kind of parallelism.

    To load: tensors of the right sizes; of other ranks than wrote, each takes the first's.
    """
    states = {"torch": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    ranks, found = agreement.count(), {}
    for name, value in states.items():
        state = value.cpu() if save else torch.zeros_like(value, device="cpu")
        offsets = (0, agreement.number(), ranks) if save or same_ranks else (0, 0, 1)
        item = ShardedTensor.from_rank_offsets(f"rng.{name}", state, offsets, prepend_axis_num=1)
        found[item.key] = item if save or same_ranks else replace(item, allow_shape_mismatch=True)
    return found


def _set_random_states(loaded: dict[str, Any]) -> None:
    # Loading gives the tensors a row for the rank, which the next save would add to.
    states = {item.key.removeprefix("rng."): item.data.reshape(-1) for item in loaded.values()}
    torch.set_rng_state(states.pop("torch"))
    tracker = get_cuda_rng_tracker()
    if states:
        tracker.set_states({**tracker.get_states(), **states})
