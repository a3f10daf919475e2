"""The losses over 2 and 4 tensor-parallel ranks equal one rank, in loss and in gradient (cases B1, B2, B6, C4).

Every rank computes the one-rank result itself and hands back the ratio and the error of its own part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from ranks import Results, run_ranks
from torch import Tensor

from nemo_qad.distillation.kl import NonFiniteError, kl_divergence, reference_kl
from nemo_qad.distillation.linear_kl import linear_kl
from nemo_qad.distillation.sparse_kl import sparse_kl
from nemo_qad.distillation.sparse_logits import sampled_logits, top_k_logits

T, D = 28, 12
RANKS = (1, 2, 4)


@dataclass
class Case:
    """Inputs of one rank count: whole tensors, and what this rank holds of them."""

    vocab_size: int
    teacher_hidden: Tensor
    teacher_weight: Tensor
    student_hidden: Tensor
    student_weight: Tensor
    mask: Tensor
    group: dist.ProcessGroup

    def rows(self, weight: Tensor) -> Tensor:
        return weight.detach().chunk(self.group.size())[self.group.rank()].clone().requires_grad_()

    def tokens(self, hidden: Tensor) -> Tensor:
        return hidden.detach().chunk(self.group.size())[self.group.rank()].clone().requires_grad_()


def make_case(vocab_size: int, width: int, mask: str) -> Case:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    teacher_hidden, teacher_weight = normal(T, D), normal(width, D)
    kept = {
        "all": torch.ones(T),
        "some": (torch.rand(T, generator=generator) > 0.4).float(),
        "one": torch.zeros(T).index_fill(0, torch.tensor([T - 2]), 1),
        "first half": torch.cat([torch.ones(T // 2), torch.zeros(T // 2)]),
        "none": torch.zeros(T),
    }[mask]
    return Case(
        vocab_size,
        teacher_hidden,
        teacher_weight,
        (teacher_hidden + 0.3 * normal(T, D)).requires_grad_(),
        (teacher_weight + 0.3 * normal(width, D)).requires_grad_(),
        kept,
        dist.group.WORLD,
    )


def compare(
    prefix: str, truth: Tensor, found: Tensor, truths: list[Tensor], founds: list[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Absolute errors of a loss and its gradients, and the ratio of the gradients' norms."""
    yield f"{prefix}|loss", (truth - found).detach().abs()
    for number, (expected, got) in enumerate(zip(truths, founds, strict=True)):
        assert expected.shape == got.shape, prefix
        yield f"{prefix}|gradient {number}", (expected - got).abs().max()
        if expected.norm() > 0:
            yield f"{prefix}|ratio {number}", got.norm() / expected.norm()


# V 100 in 4 x 128: three ranks of padding alone. 507 in 4 x 128: part of the last. 512: none.
SHAPES = [(100, 100), (100, 512), (507, 512), (512, 512)]
MASKS = ["all", "some", "one", "first half", "none"]


def on_logits(case: Case, name: str) -> Iterator[tuple[str, Tensor]]:
    for reverse, temperature in ((False, 1.0), (False, 2.5), (True, 1.5)):
        settings = {"vocab_size": case.vocab_size, "temperature": temperature, "reverse": reverse}
        teacher = case.teacher_hidden @ case.teacher_weight.T
        student = (case.student_hidden @ case.student_weight.T).detach().requires_grad_()
        truth, _ = reference_kl(teacher, student, case.mask, **settings)
        (truth_gradient,) = torch.autograd.grad(truth, student)
        shard = case.rows(student.T).detach().T.contiguous().requires_grad_()
        teacher_shard = case.rows(teacher.T).detach().T.contiguous()
        loss, _ = kl_divergence(teacher_shard, shard, case.mask, **settings, group=case.group)
        (gradient,) = torch.autograd.grad(loss, shard)
        expected = truth_gradient.chunk(case.group.size(), 1)[case.group.rank()]
        yield from compare(f"kl {name} {reverse} {temperature}", truth, loss, [expected], [gradient])


def fused(case: Case, name: str) -> Iterator[tuple[str, Tensor]]:
    whole = (case.student_hidden, case.student_weight)
    for reverse, chunk_size, sharded in itertools.product((False, True), (1, 7, T, T + 1, None), (False, True)):
        settings = {"vocab_size": case.vocab_size, "temperature": 1.5, "reverse": reverse}
        logits = case.teacher_hidden @ case.teacher_weight.T, whole[0] @ whole[1].T
        truth, count = reference_kl(*logits, case.mask, **settings)
        truths = torch.autograd.grad(truth, whole)
        part = case.tokens if sharded else (lambda hidden: hidden.detach().clone().requires_grad_())
        student = (part(whole[0]), case.rows(whole[1]))
        loss, found_count = linear_kl(
            part(case.teacher_hidden), case.rows(case.teacher_weight), *student, case.mask, **settings,
            group=case.group, sequence_parallel=sharded, chunk_size=chunk_size,
        )  # fmt: skip
        assert found_count == count
        gradients = torch.autograd.grad(loss, student)
        expected = [part(truths[0]).detach(), case.rows(truths[1]).detach()]
        yield from compare(f"linear_kl {name} {reverse} {chunk_size} {sharded}", truth, loss, expected, list(gradients))


def sparse(case: Case, name: str) -> Iterator[tuple[str, Tensor]]:
    whole = (case.student_hidden, case.student_weight)
    local = case.rows(case.teacher_weight).detach()
    uniform = torch.rand(T, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    sizes = {"vocab_size": case.vocab_size, "temperature": 1.5}
    for kind, number in (("top_k", 5), ("top_k", 90), ("sampled", 64)):
        if kind == "top_k":
            one, many = (
                top_k_logits(case.teacher_hidden, w, k=number, group=g, **sizes)
                for w, g in ((case.teacher_weight, None), (local, case.group))
            )
        else:
            one, many = (
                sampled_logits(case.teacher_hidden, w, num_samples=number, uniform_T=uniform, group=g, **sizes)
                for w, g in ((case.teacher_weight, None), (local, case.group))
            )
        yield f"{kind} {number} {name}|indices", (one.indices_TK != many.indices_TK).sum()
        yield f"{kind} {number} {name}|log_prob", (one.log_prob_TK - many.log_prob_TK).abs().max()
        if one.log_tail_T is not None and many.log_tail_T is not None:
            yield f"{kind} {number} {name}|log_prob of the tail", (one.log_tail_T - many.log_tail_T).abs().max()
        truth, _ = sparse_kl(one, *whole, case.mask, **sizes)
        truths = torch.autograd.grad(truth, whole)
        for sharded in (False, True):
            part = case.tokens if sharded else (lambda hidden: hidden.detach().clone().requires_grad_())
            student = (part(whole[0]), case.rows(whole[1]))
            loss, _ = sparse_kl(
                one, *student, case.mask, **sizes, group=case.group, sequence_parallel=sharded, chunk_size=7
            )
            gradients = torch.autograd.grad(loss, student)
            expected = [part(truths[0]).detach(), case.rows(truths[1]).detach()]
            yield from compare(f"{kind} {number} {name} {sharded}", truth, loss, expected, list(gradients))


def collectives(case: Case) -> Iterator[tuple[str, Tensor]]:
    """How often each collective runs in forward and in backward of 4 chunks of 7 tokens."""
    names = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor")
    originals = {name: getattr(dist, name) for name in names}
    counts = dict.fromkeys(names, 0)

    def counting(name: str):
        def call(*arguments, **settings):
            counts[name] += 1
            return originals[name](*arguments, **settings)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    for sharded in (False, True):
        part = case.tokens if sharded else (lambda hidden: hidden.detach().clone().requires_grad_())
        counts.update(dict.fromkeys(names, 0))
        loss, _ = linear_kl(
            part(case.teacher_hidden), case.rows(case.teacher_weight), part(case.student_hidden),
            case.rows(case.student_weight), torch.ones(T), vocab_size=case.vocab_size, group=case.group,
            sequence_parallel=sharded, chunk_size=8,
        )  # fmt: skip
        for name in names:
            yield f"collectives {sharded}|forward {name}", torch.tensor(counts[name])
        counts.update(dict.fromkeys(names, 0))
        loss.backward()
        yield f"collectives {sharded}|backward", torch.tensor(sum(counts.values()))


def non_finite(case: Case) -> Iterator[tuple[str, Tensor]]:
    """A NaN that one rank alone holds is named by all: none waits for a rank that has stopped."""
    for where in ("student hidden", "teacher weight"):
        hidden, weight = case.tokens(case.student_hidden).detach(), case.rows(case.teacher_weight).detach()
        if case.group.rank() == case.group.size() - 1:
            (hidden if where == "student hidden" else weight)[0, 0] = torch.nan
        with pytest.raises(NonFiniteError) as caught:
            linear_kl(
                case.tokens(case.teacher_hidden), weight, hidden, case.rows(case.student_weight), torch.ones(T),
                vocab_size=case.vocab_size, group=case.group, sequence_parallel=True,
            )  # fmt: skip
        assert {"student hidden": "student's hidden", "teacher weight": "teacher's output weight"}[where] in str(
            caught.value
        )
        yield f"non-finite {where}|token", torch.tensor(caught.value.token)


def all_cases(rank: int) -> Results:
    results: Results = {}
    for (vocab_size, width), mask in itertools.product(SHAPES, MASKS):
        case = make_case(vocab_size, width, mask)
        name = f"{vocab_size}/{width} {mask}"
        results |= dict(on_logits(case, name)) | dict(fused(case, name))
        if vocab_size >= 90:
            results |= dict(sparse(case, name))
    case = make_case(507, 512, "all")
    if case.group.size() > 1:
        results |= dict(collectives(case)) | dict(non_finite(case))
    return results


@pytest.fixture(scope="module", params=RANKS)
def results(request: pytest.FixtureRequest) -> tuple[int, list[Results]]:
    return request.param, run_ranks(all_cases, request.param)


def select(results: list[Results], kinds: tuple[str, ...], measure: str) -> list[tuple[str, float]]:
    found = [
        (name, float(value))
        for of_rank in results
        for name, value in of_rank.items()
        if name.startswith(kinds) and name.partition("|")[2].startswith(measure)
    ]
    assert found, f"nothing was measured of {measure} of {kinds}"
    return found


@pytest.mark.parametrize("kind", ["kl ", "linear_kl ", "top_k ", "sampled "])
def test_loss_and_gradient_equal_one_rank(results: tuple[int, list[Results]], kind: str) -> None:
    """FP64, so that a wrong scale, a missing rank or a padded column cannot hide behind rounding."""
    for measure in ("loss", "gradient"):
        worst = max(select(results[1], (kind,), measure), key=lambda item: item[1])
        assert worst[1] < 1e-11, worst


@pytest.mark.parametrize("kind", ["kl ", "linear_kl ", "top_k ", "sampled "])
def test_a_ranks_gradient_has_the_one_rank_size(results: tuple[int, list[Results]], kind: str) -> None:
    """B1, B2: the stock top-k loss has TP times the gradient; every ratio here is 1.0000."""
    ratios = [value for _, value in select(results[1], (kind,), "ratio")]
    assert min(ratios) == pytest.approx(1, abs=1e-9)
    assert max(ratios) == pytest.approx(1, abs=1e-9)


def test_values_of_a_sharded_teacher_equal_one_rank(results: tuple[int, list[Results]]) -> None:
    assert max(value for _, value in select(results[1], ("top_k ", "sampled "), "indices")) == 0
    assert max(value for _, value in select(results[1], ("top_k ", "sampled "), "log_prob")) < 1e-6


def test_one_packed_collective_a_chunk_and_none_in_backward(results: tuple[int, list[Results]]) -> None:
    """4 chunks of at most 8 of 28 tokens. Beyond the loss's gather: one reduction of the hidden states' gradient, and
    under sequence parallelism one gather of each model's hidden states."""
    ranks, of_ranks = results
    if ranks == 1:
        pytest.skip("one rank has no collectives")
    for found in of_ranks:
        counted = {name: int(value) for name, value in found.items() if name.startswith("collectives")}
        assert counted == {
            "collectives False|forward all_gather_into_tensor": 4,
            "collectives False|forward all_reduce": 4,
            "collectives False|forward reduce_scatter_tensor": 0,
            "collectives False|backward": 0,
            "collectives True|forward all_gather_into_tensor": 3 * 4,
            "collectives True|forward all_reduce": 0,
            "collectives True|forward reduce_scatter_tensor": 4,
            "collectives True|backward": 0,
        }


def test_all_ranks_name_the_same_token(results: tuple[int, list[Results]]) -> None:
    ranks, of_ranks = results
    if ranks == 1:
        pytest.skip("one rank agrees with itself")
    for found in of_ranks:
        assert int(found["non-finite student hidden|token"]) == T - T // ranks
        assert int(found["non-finite teacher weight|token"]) == 0
