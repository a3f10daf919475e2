"""The student's output layer and a loss on its logits in one, a chunk of tokens at a time.

Neither the logits nor their gradient exist beyond a chunk: each chunk is projected, compared with the teacher,
and turned into gradients of the hidden states and of the output weight at once. What backward does is to
multiply those by the gradient of the loss.

Legend: T tokens, C tokens of a chunk, D hidden, V true vocabulary, v columns of this rank, B columns of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_qad.distillation.kl import Columns, NonFiniteError, block_size, wide
from nemo_qad.distillation.tokens import Chunk, SequenceShards, Tokens

MEMORY_BUDGET = 128 * 2**20  # bytes of logits at a time; a GPU wants more, so that its matrix products are large
# More tokens at once win nothing once the products are large enough, and leave the caches.
MOST_TOKENS_CPU, MOST_TOKENS_GPU = 256, 8192


class Teacher(Protocol):
    """What a chunk of student logits is compared with. Called in this order for each chunk."""

    num_buffers: int  # tensors [C, v] that it keeps for a chunk
    tokens: Tokens  # set by `fused_loss` before anything is called

    def begin(self, chunk: Chunk, dtype: torch.dtype) -> None: ...

    def compare(self, block: slice, student_CB: Tensor) -> None:
        """Takes statistics of a block of logits / tau, which it may overwrite."""

    def loss(self) -> Tensor:
        """The loss of each token of the chunk, FP64 [C], after the one collective of the chunk."""

    def gradient(self, block: slice, student_CB: Tensor) -> Tensor:
        """d loss / d student logits of a block, into `student_CB` as `compare` left it."""

    def weak_points(self, token: int, row: int | None) -> list[tuple[str, bool]]:
        """Where this rank holds NaN or Inf: (what it is, whether it has some), the same list on all ranks.

        token: its index in the mask; row: of the hidden states, None where another rank holds them.
        """


@dataclass(frozen=True)
class Plan:
    """How one call goes: which tokens and columns, in which chunks, and which gradients are wanted."""

    tokens: Tokens
    columns: Columns
    temperature: float
    chunk_size: int
    hidden_gradient: bool
    weight_gradient: bool
    repeat_backward: bool


def _make_plan(
    student_hidden_TD: Tensor,
    student_weight_vD: Tensor,
    mask_T: Tensor,
    columns: Columns,
    *,
    num_buffers: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    memory_budget: int,
    chunk_size: int | None,
    repeat_backward: bool,
) -> Plan:
    """Checks shapes and chooses the chunks.

    Raises:
        ValueError: hidden states, weight and mask do not fit, or a single token needs more than the budget.
    """
    if student_hidden_TD.ndim != 2 or student_weight_vD.ndim != 2 or mask_T.ndim != 1:
        raise ValueError("hidden states, output weight and mask must be [T, D], [v, D] and [T]")
    if student_hidden_TD.shape[1] != student_weight_vD.shape[1]:
        raise ValueError(
            f"student: hidden states have {student_hidden_TD.shape[1]} values a token and the output weight has "
            f"{student_weight_vD.shape[1]} a word"
        )
    sharded = sequence_parallel and group is not None and group.size() > 1
    tokens = SequenceShards(mask_T, group) if sharded and group is not None else Tokens(mask_T, group)
    if tokens.local_tokens != len(student_hidden_TD):
        raise ValueError(f"student: {len(student_hidden_TD)} hidden states for a mask of {len(mask_T)} tokens")
    if chunk_size is None:
        chunk_size = _chunk_size(student_hidden_TD, columns, num_buffers + 1, memory_budget)
    elif chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1")
    grad = torch.is_grad_enabled()
    return Plan(
        tokens,
        columns,
        temperature,
        chunk_size,
        grad and student_hidden_TD.requires_grad,
        grad and student_weight_vD.requires_grad,
        repeat_backward,
    )


def _chunk_size(hidden_TD: Tensor, columns: Columns, num_buffers: int, budget: int) -> int:
    """Tokens whose logits fit into `budget` bytes; one block and a few rows of hidden size come on top."""
    token = wide(hidden_TD.dtype).itemsize * num_buffers * columns.width
    if token > budget:
        raise ValueError(f"memory_budget={budget} bytes is less than one token needs: give at least {token}")
    return min(budget // token, MOST_TOKENS_GPU if hidden_TD.is_cuda else MOST_TOKENS_CPU)


def fused_loss(
    teacher: Teacher,
    student_hidden_TD: Tensor,
    student_weight_vD: Tensor,
    mask_T: Tensor,
    columns: Columns,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """(sum of the losses of the counted tokens with gradients for hidden states and weight, their number).

    `settings`: temperature to repeat_backward, as `linear_kl.linear_kl` describes them.

    Raises:
        ValueError: shapes or the budget do not fit; `NonFiniteError`: a loss is NaN or infinite.
    """
    plan = _make_plan(
        student_hidden_TD, student_weight_vD, mask_T, columns, num_buffers=teacher.num_buffers, **settings
    )
    teacher.tokens = plan.tokens
    total: Tensor = _FusedLoss.apply(student_hidden_TD, student_weight_vD, teacher, plan)
    return total, torch.tensor(plan.tokens.count, device=total.device)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_vD, teacher, plan):  # type: ignore[no-untyped-def]
        dtype, device = wide(hidden_TD.dtype), hidden_TD.device
        most = min(plan.chunk_size, max(plan.tokens.count, 1))
        if isinstance(plan.tokens, SequenceShards):
            most = max(most, plan.tokens.ranks)  # one token of each rank is the least that a chunk can hold
        scratch = torch.empty(most * plan.columns.valid, dtype=dtype, device=device)
        grad_hidden = torch.zeros_like(hidden_TD) if plan.hidden_gradient else None
        grad_weight = torch.zeros_like(weight_vD, dtype=dtype) if plan.weight_gradient else None
        total = torch.zeros((), dtype=torch.float64, device=device)
        none_yet = plan.tokens.num_tokens
        first_bad = torch.full((), none_yet, device=device)
        for chunk in plan.tokens.chunks(plan.chunk_size):
            hidden_CD = plan.tokens.take(hidden_TD, chunk)
            teacher.begin(chunk, dtype)
            loss_C = _compare(hidden_CD, weight_vD, scratch, teacher, plan)
            total += loss_C.sum()
            first_bad = torch.where(loss_C.isfinite(), none_yet, chunk.tokens).min().minimum(first_bad)
            if grad_hidden is not None or grad_weight is not None:
                grad_CD = _differentiate(hidden_CD, weight_vD, scratch, teacher, plan, grad_weight)
                if grad_hidden is not None:
                    plan.tokens.put(grad_hidden, chunk, grad_CD)
        if first_bad < none_yet:
            _refuse(int(first_bad), hidden_TD, weight_vD[: plan.columns.valid], teacher, plan.tokens)
        ctx.gradients, ctx.repeat, ctx.weight_dtype = (grad_hidden, grad_weight), plan.repeat_backward, weight_vD.dtype
        return total.to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_total):  # type: ignore[no-untyped-def]
        if ctx.gradients is None:
            raise RuntimeError("this loss was differentiated before: pass repeat_backward=True to do so again")
        hidden, weight = ctx.gradients
        if ctx.repeat:
            scaled = [None if g is None else g.clone().mul_(grad_total) for g in ctx.gradients]
        else:
            # In place, as a copy of the weight's gradient may be gigabytes. FP32 times, then the tensor's own dtype.
            ctx.gradients = None
            scaled = [None if g is None else g.mul_(grad_total) for g in (hidden, weight)]
        return scaled[0], None if weight is None else scaled[1].to(ctx.weight_dtype), None, None


def _compare(hidden_CD: Tensor, weight_vD: Tensor, scratch: Tensor, teacher: Teacher, plan: Plan) -> Tensor:
    """Projects the student block by block and has each block compared; returns the tokens' losses, FP64 [C]."""
    operand_CD = operand(hidden_CD, scratch.dtype)
    for block in blocks(len(hidden_CD), scratch, plan.columns):
        student_CB = block_of(scratch, len(hidden_CD), block)
        project(operand_CD, weight_vD[block], student_CB, plan.temperature)
        teacher.compare(block, student_CB)
    return teacher.loss()


def _differentiate(
    hidden_CD: Tensor,
    weight_vD: Tensor,
    scratch: Tensor,
    teacher: Teacher,
    plan: Plan,
    grad_weight_vD: Tensor | None,
) -> Tensor:
    """Adds to the weight's gradient and returns the hidden states', this rank's columns' part of it, [C, D]."""
    operand_CD = operand(hidden_CD, scratch.dtype)
    grad_CD = torch.zeros(hidden_CD.shape, dtype=scratch.dtype, device=scratch.device)
    for block in blocks(len(hidden_CD), scratch, plan.columns):
        grad_CB = teacher.gradient(block, block_of(scratch, len(hidden_CD), block))
        if plan.hidden_gradient:
            accumulate(grad_CD, grad_CB, weight_vD[block])
        if grad_weight_vD is not None:
            accumulate(grad_weight_vD[block], grad_CB.T, operand_CD)
    return grad_CD


def blocks(num_tokens: int, scratch: Tensor, columns: Columns) -> list[slice]:
    """The rank's valid columns in blocks that suit its caches, the same for every use of one chunk."""
    return list(columns.blocks(block_size(num_tokens, scratch, scratch.dtype.itemsize)))


def block_of(scratch: Tensor, num_tokens: int, block: slice) -> Tensor:
    """A chunk's logits of one block, [C, B], in scratch memory [at least C * v] that holds block after block.

    Each block is contiguous: rows of the whole vocabulary lie a power of two apart, and contend for the same cache
    lines.
    """
    return scratch[num_tokens * block.start : num_tokens * block.stop].view(num_tokens, -1)


def operand(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A factor as the products below want it: narrow on a GPU, whose products of BF16 come out in FP32; FP32 on a
    CPU, whose products of BF16 would be rounded to BF16."""
    return matrix if matrix.is_cuda else matrix.to(dtype)


def project(hidden_CD: Tensor, weight_BD: Tensor, logits_CB: Tensor, temperature: float) -> None:
    """logits = hidden @ weight.T / tau, in the dtype of `logits_CB`."""
    if hidden_CD.dtype != logits_CB.dtype:
        logits_CB.copy_(torch.mm(hidden_CD, weight_BD.T, out_dtype=logits_CB.dtype))
    else:
        torch.mm(hidden_CD, weight_BD.to(logits_CB.dtype).T, out=logits_CB)
    if temperature != 1:
        logits_CB.div_(temperature)


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the dtype of `total`."""
    if b.is_cuda and b.dtype != total.dtype:
        total.add_(torch.mm(a.to(b.dtype), b, out_dtype=total.dtype))
    elif len(total) <= 3:
        # MKL adds a product of so few rows onto a total one term at a time, which loses FP32 digits.
        total.add_(torch.mm(a, b.to(total.dtype)))
    else:
        total.addmm_(a, b.to(total.dtype))


def not_finite(tensor: Tensor, row: int | None = None) -> bool:
    """Whether a tensor, or one row of it, holds NaN or Inf."""
    return not bool((tensor if row is None else tensor[row]).isfinite().all())


def _refuse(token: int, hidden_TD: Tensor, weight_vD: Tensor, teacher: Teacher, tokens: Tokens) -> None:
    """Raises NonFiniteError with all that holds NaN or Inf; every rank of the group gets here, and agrees."""
    row = tokens.owner(token)
    points = [
        *teacher.weak_points(token, row),
        ("the student's hidden state", row is not None and not_finite(hidden_TD, row)),
        ("the student's output weight", not_finite(weight_vD)),
    ]
    flags = torch.tensor([bad for _, bad in points], dtype=torch.int32, device=hidden_TD.device)
    if tokens.ranks > 1:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=tokens.group)
    guilty = [what for (what, _), bad in zip(points, flags.tolist(), strict=True) if bad]
    holds = " and ".join(guilty) + " hold NaN or Inf" if guilty else "the logits are too large for FP32"
    raise NonFiniteError(token, holds)
