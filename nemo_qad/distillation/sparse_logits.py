"""K values a token of a teacher's distribution, from its hidden states and output weight: top-k, or draws.

Legend: T tokens, C tokens of a chunk, D hidden, v columns of this rank, V true vocabulary, K values a token, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_qad.distillation.fused import MEMORY_BUDGET, blocks, operand, project
from nemo_qad.distillation.kl import Columns, Divergence, NonFiniteError, gather_parts, local_columns, wide
from nemo_qad.distillation.sparse_kl import SparseLogits

# Buffers of the size of a chunk's FP32 logits: the logits, what log-sum-exp copies, an FP64 running sum.
_NUM_BUFFERS = 5


@torch.no_grad()
def top_k_logits(
    hidden_TD: Tensor,
    weight_vD: Tensor,
    *,
    k: int,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> SparseLogits:
    """The k most likely words of each token with their log-probabilities, and the log of all other probability.

    Args:
        hidden_TD: [T, D], whole on every rank of `group`; weight_vD: this rank's rows of the padded output weight.
        k: 1..V. temperature: tau > 0. memory_budget: bytes of scratch.

    Returns:
        [T, k] in falling order, the same on all ranks; equal probabilities come in any order.

    Raises:
        ValueError: sizes do not fit; `NonFiniteError`: a hidden state or the weight holds NaN or Inf.
    """
    if not 1 <= k <= vocab_size:
        raise ValueError(f"k={k} must be in 1..{vocab_size}, the true vocabulary")
    columns = local_columns(len(weight_vD), vocab_size, group)

    def select(logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        lse_C = _combined(_log_sum_exp(logits_CV), group)
        _refuse_non_finite(lse_C, rows.start)
        num_local = min(k, columns.width)
        value_CK = logits_CV.new_full((len(logits_CV), num_local), -torch.inf, dtype=torch.float64)
        index_CK = torch.zeros_like(value_CK)  # FP64 holds every index exactly
        if columns.valid:
            best = logits_CV.topk(min(k, columns.valid))
            value_CK[:, : best.values.shape[1]] = best.values
            index_CK[:, : best.values.shape[1]] = best.indices + columns.first
        both_R = gather_parts(torch.stack([value_CK, index_CK], 1), group)
        value_CK, index_CK = both_R.permute(2, 1, 0, 3).flatten(2).unbind(0)
        best = value_CK.topk(k)
        index_CK = index_CK.gather(1, best.indices).long()
        local_CK = index_CK - columns.first
        here_CK = (local_CK >= 0) & (local_CK < columns.valid)
        out_CK = torch.where(here_CK, -torch.inf, torch.inf).to(logits_CV.dtype)
        if columns.valid:
            logits_CV.scatter_reduce_(1, torch.where(here_CK, local_CK, 0), out_CK, "amin")
        log_tail_C = _combined(_log_sum_exp(logits_CV), group) - lse_C
        return index_CK, best.values - lse_C[:, None], log_tail_C

    return _collect(hidden_TD, weight_vD, columns, temperature, memory_budget, select)


@torch.no_grad()
def sampled_logits(
    hidden_TD: Tensor,
    weight_vD: Tensor,
    *,
    num_samples: int,
    uniform_T: Tensor,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> SparseLogits:
    """Draws of each token's distribution: unbiased, and with less noise than independent draws.

    Systematic sampling: the points (u + 0), (u + 1) .. (u + K - 1) over K, for one u a token, are looked up in
    the running sum of the probabilities. A word of probability p is drawn floor(K p) or ceil(K p) times, K p in
    the mean.

    Args:
        num_samples: K, draws a token. uniform_T: u in [0, 1) for each token, the same on all ranks.
        Others: as `top_k_logits` has them.

    Returns:
        [T, K] with repetitions, the same on all ranks, and no tail.

    Raises:
        ValueError: sizes do not fit; `NonFiniteError`: a hidden state or the weight holds NaN or Inf.
    """
    if num_samples < 1 or uniform_T.shape != hidden_TD.shape[:1]:
        raise ValueError(
            f"num_samples={num_samples} must be at least 1, uniform {tuple(uniform_T.shape)} be [{len(hidden_TD)}]"
        )
    columns = local_columns(len(weight_vD), vocab_size, group)
    rank = 0 if group is None else group.rank()
    offsets_K = torch.arange(num_samples, dtype=torch.float64, device=hidden_TD.device)

    def select(logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor, None]:
        lse_RC = gather_parts(_log_sum_exp(logits_CV), group)
        lse_C = lse_RC.logsumexp(0)
        _refuse_non_finite(lse_C, rows.start)
        mass_CR = (lse_RC - lse_C).exp().T.contiguous()
        end_CR = mass_CR.cumsum(1)
        point_CK = (uniform_T[rows].double()[:, None] + offsets_K) / num_samples
        point_CK = _below(point_CK * end_CR[:, -1:], end_CR)
        owned_CK = torch.searchsorted(end_CR, point_CK, right=True) == rank
        found_CK2 = torch.zeros(*point_CK.shape, 2, dtype=torch.float64, device=point_CK.device)
        if columns.valid:
            end_CV = (logits_CV.double() - lse_C[:, None]).exp_().cumsum(1)
            start_C1 = end_CR[:, rank : rank + 1] - mass_CR[:, rank : rank + 1]
            own_CK = _below((point_CK - start_C1).clamp_(min=0), end_CV)
            index_CK = torch.searchsorted(end_CV, own_CK, right=True)
            log_p_CK = logits_CV.gather(1, index_CK).double() - lse_C[:, None]
            found_CK2 = torch.stack([(index_CK + columns.first).double(), log_p_CK], 2)
        found_CK2 = torch.where(owned_CK[..., None], found_CK2, 0)
        if group is not None and group.size() > 1:
            dist.all_reduce(found_CK2, group=group)
        return found_CK2[..., 0].round().long(), found_CK2[..., 1], None

    return _collect(hidden_TD, weight_vD, columns, temperature, memory_budget, select)


def _below(point_CK: Tensor, end_CN: Tensor) -> Tensor:
    """Points moved below the end of a running sum, where rounding has put them on it or beyond."""
    last_C1 = end_CN[:, -1:].contiguous()
    return torch.minimum(point_CK, torch.nextafter(last_C1, torch.zeros_like(last_C1)))


def _log_sum_exp(logits_CV: Tensor) -> Tensor:
    """FP64 [C]; -inf where a rank has no column."""
    if not logits_CV.shape[1]:
        return logits_CV.new_full(logits_CV.shape[:1], -torch.inf, dtype=torch.float64)
    maximum_C1 = logits_CV.amax(1, keepdim=True).clamp(min=torch.finfo(logits_CV.dtype).min)
    return (logits_CV - maximum_C1).exp_().sum(1, dtype=torch.float64).log() + maximum_C1[:, 0]


def _refuse_non_finite(lse_C: Tensor, start: int) -> None:
    """Every rank gets here with the same numbers, before any of them is used as an index."""
    bad_C = ~lse_C.isfinite()
    if bad_C.any():
        raise NonFiniteError(
            start + int(bad_C.nonzero()[0]), "the teacher's hidden state or output weight holds NaN or Inf"
        )


def _combined(lse_C: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return gather_parts(lse_C, group).logsumexp(0)


Select = Callable[[Tensor, slice], tuple[Tensor, Tensor, Tensor | None]]


def _collect(
    hidden_TD: Tensor, weight_vD: Tensor, columns: Columns, temperature: float, memory_budget: int, select: Select
) -> SparseLogits:
    """Projects the tokens chunk by chunk and puts together what `select` takes of each chunk's logits / tau."""
    Divergence(temperature)  # refuses a temperature that cannot be
    if hidden_TD.ndim != 2 or weight_vD.ndim != 2 or hidden_TD.shape[1] != weight_vD.shape[1] or not len(hidden_TD):
        raise ValueError(
            f"hidden states {tuple(hidden_TD.shape)} and output weight {tuple(weight_vD.shape)} must be [T, D] and "
            "[v, D], with T of at least 1"
        )
    dtype = wide(hidden_TD.dtype)
    chunk_size = max(1, memory_budget // (_NUM_BUFFERS * dtype.itemsize * columns.width))
    found = []
    for start in range(0, len(hidden_TD), chunk_size):
        rows = slice(start, min(start + chunk_size, len(hidden_TD)))
        hidden_CD = operand(hidden_TD[rows], dtype)
        logits_CV = torch.empty(len(hidden_CD), columns.valid, dtype=dtype, device=hidden_TD.device)
        for block in blocks(len(logits_CV), logits_CV, columns):
            project(hidden_CD, weight_vD[block], logits_CV[:, block], temperature)
        index_CK, log_prob_CK, log_tail_C = select(logits_CV, rows)
        found.append((index_CK.int(), log_prob_CK.float(), log_tail_C))
    tails = [tail.float() for _, _, tail in found if tail is not None]
    return SparseLogits(
        torch.cat([index for index, _, _ in found]),
        torch.cat([log_prob for _, log_prob, _ in found]),
        torch.cat(tails) if tails else None,
    )
