"""The part of benchmarks/kl.py that compares with a truth: errors, gradients over ranks, sparse teachers, long runs."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from nemo_qad.distillation.kl import kl_divergence, reference_kl
from nemo_qad.distillation.linear_kl import linear_kl
from nemo_qad.distillation.sparse_kl import SparseLogits, reference_sparse_kl, sparse_kl
from nemo_qad.distillation.sparse_logits import sampled_logits, top_k_logits
from nemo_qad.noise import silence

RANKS = (1, 2, 4)
silence()  # here, so that the ranks that import this module are silent too


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def accuracy(job: dict[str, Any]) -> dict[str, Any]:
    """FP32 and bf16 against an FP64 truth of the same inputs, for models that nearly agree and that do not."""
    tokens, words, hidden = (16, 1000, 32) if job["quick"] else (128, 131072, 256)
    result: dict[str, Any] = {}
    for name, dtype in (("", torch.float32), ("_unrelated", torch.float32), ("_bf16", torch.bfloat16)):
        inputs = _inputs(tokens, words, hidden, dtype, related=name != "_unrelated")
        mask = torch.ones(tokens)
        wide = [t.detach().double() for t in inputs]
        wide = [*wide[:2], *(t.requires_grad_() for t in wide[2:])]
        truth, _ = reference_kl(wide[0] @ wide[1].T, wide[2] @ wide[3].T, mask, vocab_size=words)
        gradients = torch.autograd.grad(truth, wide[2:])
        fused, _ = linear_kl(*inputs, mask, vocab_size=words)
        found = torch.autograd.grad(fused, inputs[2:])
        logits = (inputs[0] @ inputs[1].T).float(), (inputs[2] @ inputs[3].T).float()
        plain, _ = reference_kl(*logits, mask, vocab_size=words)
        naive = torch.autograd.grad(plain, inputs[2:])
        result |= {
            f"loss_error{name}": abs(fused.item() / truth.item() - 1),
            f"gradient_error{name}": max(relative(f, t) for f, t in zip(found, gradients, strict=True)),
            f"loss_error{name}_naive": abs(plain.item() / truth.item() - 1),
            f"gradient_error{name}_naive": max(relative(f, t) for f, t in zip(naive, gradients, strict=True)),
            f"kl_per_token{name}": truth.item() / tokens,
        }
    return result


def _inputs(tokens: int, words: int, hidden: int, dtype: torch.dtype, *, related: bool) -> list[Tensor]:
    torch.manual_seed(1)
    hidden_t, weight_t = torch.randn(tokens, hidden), torch.randn(words, hidden) / hidden**0.5
    noise_h, noise_w = torch.randn(tokens, hidden), torch.randn(words, hidden)
    if related:
        hidden_s, weight_s = hidden_t + 0.1 * noise_h, weight_t + 0.02 * noise_w
    else:
        hidden_s, weight_s = noise_h, noise_w / hidden**0.5
    return [hidden_t.to(dtype), weight_t.to(dtype), *(t.to(dtype).requires_grad_() for t in (hidden_s, weight_s))]


def gradient_ratios(job: dict[str, Any]) -> dict[str, Any]:
    """A rank's gradient over the one-rank gradient of the same columns, for ours and for ModelOpt's losses."""
    del job
    by_loss: dict[str, list[float]] = {}
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (ranks, folder), nprocs=ranks)
            found = [torch.load(Path(folder) / str(rank), weights_only=True) for rank in range(ranks)]
        for loss in found[0]:
            ratios = [each[loss] for each in found]
            by_loss.setdefault(loss, []).append(max(ratios, key=lambda ratio: abs(ratio - 1)))
    ours = [by_loss[name] for name in by_loss if not name.startswith("modelopt")]
    furthest = [max(values, key=lambda ratio: abs(ratio - 1)) for values in zip(*ours, strict=True)]
    for loss, values in by_loss.items():
        print(f"gradient over one rank's at TP 1, 2, 4: {loss:16} {', '.join(f'{v:.4f}' for v in values)}", flush=True)
    return {"gradient_ratio_tp": furthest, "gradient_ratio_tp_by_loss": by_loss}


def _rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(rank)}
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    torch.save(_ratios(rank, ranks), f"{folder}/{rank}")
    dist.destroy_process_group()


def _ratios(rank: int, ranks: int) -> dict[str, float]:
    tokens, words, hidden = 64, 1024, 32
    teacher_hidden, teacher_weight, student_hidden, student_weight = (
        t.detach() for t in _inputs(tokens, words, hidden, torch.float64, related=True)
    )
    mask, group = torch.ones(tokens), dist.group.WORLD
    own = teacher_weight.chunk(ranks)[rank], student_weight.chunk(ranks)[rank]
    top_k = top_k_logits(teacher_hidden, teacher_weight, k=50, vocab_size=words)
    uniform = torch.rand(tokens, generator=torch.Generator().manual_seed(0))
    drawn = sampled_logits(teacher_hidden, teacher_weight, num_samples=64, uniform_T=uniform, vocab_size=words)

    def ratio(loss, plain) -> float:  # type: ignore[no-untyped-def]
        """Norms of the gradients of this rank's rows of the weight, as the loss has them and as one rank does."""
        shard, whole = own[1].clone().requires_grad_(), student_weight.clone().requires_grad_()
        loss(shard).backward()
        plain(whole).backward()
        return float(shard.grad.norm() / whole.grad.chunk(ranks)[rank].norm())

    def dense(weight: Tensor) -> Tensor:
        return reference_kl(teacher_hidden @ teacher_weight.T, student_hidden @ weight.T, mask, vocab_size=words)[0]

    def full(weight: Tensor) -> Tensor:
        logits = teacher_hidden @ own[0].T, student_hidden @ weight.T
        return kl_divergence(*logits, mask, vocab_size=words, group=group)[0]

    def fused(weight: Tensor) -> Tensor:
        return linear_kl(teacher_hidden, own[0], student_hidden, weight, mask, vocab_size=words, group=group)[0]

    def sparse_of(values: SparseLogits):  # type: ignore[no-untyped-def]
        return (
            lambda weight: sparse_kl(values, student_hidden, weight, mask, vocab_size=words, group=group)[0],
            lambda weight: reference_sparse_kl(values, student_hidden @ weight.T, mask, vocab_size=words)[0],
        )

    from modelopt.torch.distill.plugins.megatron import LogitsKLLoss, TopKLogitsKLLoss

    config = SimpleNamespace(tensor_model_parallel_size=ranks, sequence_parallel=False, hidden_size=hidden)

    def modelopt(loss):  # type: ignore[no-untyped-def]
        def total(weight: Tensor) -> Tensor:
            logits = (student_hidden @ weight.T)[:, None], (teacher_hidden @ own[0].T)[:, None]
            return loss(*logits)[0].sum()

        return total

    def renormalised(weight: Tensor) -> Tensor:
        value, index = (teacher_hidden @ teacher_weight.T).topk(50)
        chosen = (student_hidden @ weight.T).gather(1, index)
        return reference_kl(value, chosen, mask, vocab_size=50)[0]

    return {
        "full": ratio(full, dense),
        "fused": ratio(fused, dense),
        "top_k": ratio(*sparse_of(top_k)),
        "sampled": ratio(*sparse_of(drawn)),
        "modelopt": ratio(modelopt(LogitsKLLoss(config)), dense),
        "modelopt_top_k": ratio(modelopt(TopKLogitsKLLoss(config, top_k=50)), renormalised),
    }


def sparse(job: dict[str, Any]) -> dict[str, Any]:
    """The tail attack (logits outside the top k raised by 3), and the bias of the sampled gradient."""
    words, tokens = (2000, 8) if job["quick"] else (131072, 16)
    torch.manual_seed(0)
    # A distribution with a long tail: logits fall with the logarithm of the rank, in random order of the words.
    order = torch.stack([torch.randperm(words) for _ in range(tokens)])
    teacher = torch.empty(tokens, words).scatter_(
        1, order, -1.2 * torch.arange(1, words + 1.0).log().expand(tokens, -1)
    )
    attacks = {}
    for k in (words // 128, words // 32):
        values = _exact_top_k(teacher, k)
        student = teacher + 3
        student.scatter_(1, values.indices_TK.long(), teacher.gather(1, values.indices_TK.long()))
        attacks[k] = _attack(teacher, student, values, k)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in attacks[k].items())
        print(f"tail attack at k {k}: {shown}", flush=True)
    return {"tail_attack": attacks, **_sampled_bias(quick=job["quick"])}


def _exact_top_k(logits: Tensor, k: int) -> SparseLogits:
    """Through the real maker, with the logits as output weight and one-hot hidden states."""
    return top_k_logits(torch.eye(len(logits)), logits.T.contiguous(), k=k, vocab_size=logits.shape[1])


def _attack(teacher: Tensor, student: Tensor, values: SparseLogits, k: int) -> dict[str, float]:
    from modelopt.torch.distill.plugins.megatron import TopKLogitsKLLoss

    tokens, words = teacher.shape
    mask, hidden, weight = torch.ones(tokens), torch.eye(tokens), student.T.contiguous()
    truth = reference_kl(teacher.double(), student.double(), mask, vocab_size=words)[0] / tokens
    bucket = sparse_kl(values, hidden, weight, mask, vocab_size=words)[0] / tokens
    uniform = torch.rand(tokens, generator=torch.Generator().manual_seed(1))
    draws = sampled_logits(hidden, teacher.T.contiguous(), num_samples=4096, uniform_T=uniform, vocab_size=words)
    sampled = sparse_kl(draws, hidden, weight, mask, vocab_size=words)[0] / tokens
    config = SimpleNamespace(tensor_model_parallel_size=1, sequence_parallel=False, hidden_size=1)
    stock = TopKLogitsKLLoss(config, top_k=k)(student[:, None], teacher[:, None])[0].mean()
    return {
        "true": truth.item(),
        "bucket": bucket.item(),
        "sampled_4096": sampled.item(),
        "modelopt_top_k": stock.item(),
    }


def _sampled_bias(*, quick: bool) -> dict[str, float]:
    """The gradient of the output weight from 64 values a token, against the true one: its mean, and its noise.

    A draw is made from one uniform number a token, so the mean over evenly spaced numbers is the expectation.
    """
    tokens, words, hidden, points = 64, 1000, 32, 20 if quick else 500
    inputs = _inputs(tokens, words, hidden, torch.float64, related=True)
    mask = torch.ones(tokens)
    exact, _ = linear_kl(*inputs, mask, vocab_size=words)
    (truth,) = torch.autograd.grad(exact, inputs[3])

    def estimate(uniform: Tensor) -> tuple[Tensor, Tensor]:
        values = sampled_logits(*inputs[:2], num_samples=64, uniform_T=uniform, vocab_size=words)
        loss, _ = sparse_kl(values, *inputs[2:], mask, vocab_size=words)
        return loss.detach(), torch.autograd.grad(loss, inputs[3])[0]

    even = [estimate(torch.full((tokens,), (point + 0.5) / points)) for point in range(points)]
    generator = torch.Generator().manual_seed(2)
    random = [estimate(torch.rand(tokens, generator=generator)) for _ in range(20)]
    mean = torch.stack([gradient for _, gradient in even]).mean(0)
    noise = torch.stack([(gradient - truth).square().sum() for _, gradient in random]).mean().sqrt()
    result = {
        "sampled_gradient_bias": relative(mean, truth),
        "sampled_gradient_noise": float(noise / truth.norm()),
        "sampled_loss_bias": float(torch.stack([loss for loss, _ in even]).mean() / exact - 1),
        "sampled_loss_noise": float(torch.stack([loss for loss, _ in random]).std() / exact),
    }
    print("sampled, 64 values a token: " + ", ".join(f"{k} {v:.4f}" for k, v in result.items()), flush=True)
    return result


def _identity_error(hidden: Tensor, weight: Tensor) -> float:
    """|sum(dW * W) / sum(dH * H) - 1|, by parts in FP64."""

    def inner(tensor: Tensor) -> float:
        parts = zip(tensor.detach().split(4096), tensor.grad.split(4096), strict=True)
        return sum(float((a.double() * b.double()).sum()) for a, b in parts)

    return abs(inner(weight) / inner(hidden) - 1)


def long_run(job: dict[str, Any]) -> dict[str, Any]:
    """One very long sequence. Loss and hidden gradient are compared with FP64 on 64 of its tokens. The weight's
    gradient sums over all tokens: sum(gradient * weight) must equal sum(hidden gradient * hidden), as both are
    sum(logit gradient * logit)."""
    from kl import MIB, forget_peak, models, resident_bytes

    torch.set_num_threads(job["threads"])
    teacher_hidden, teacher_weight, student_hidden, student_weight = models(job)
    tokens, words = job["tokens"], job["vocabulary"]
    forget_peak()
    before = resident_bytes("VmRSS")
    started = time.perf_counter()
    total, count = linear_kl(
        teacher_hidden, teacher_weight, student_hidden, student_weight, torch.ones(tokens), vocab_size=words,
        memory_budget=job["memory_mib"] * MIB,
    )  # fmt: skip
    total.backward()
    seconds = time.perf_counter() - started
    gradients = sum(t.grad.numel() * t.grad.itemsize for t in (student_hidden, student_weight))
    extra = resident_bytes("VmHWM") - before - gradients
    some = torch.linspace(0, tokens - 1, 64).long()
    hidden = student_hidden.detach()[some].double().requires_grad_()
    logits = teacher_hidden[some].double() @ teacher_weight.double().T, hidden @ student_weight.detach().double().T
    truth, _ = reference_kl(*logits, torch.ones(64), vocab_size=words)
    truth.backward()
    again, _ = linear_kl(
        teacher_hidden[some], teacher_weight, student_hidden.detach()[some], student_weight.detach(), torch.ones(64),
        vocab_size=words,
    )  # fmt: skip
    return {
        "tokens": tokens, "vocabulary": words, "hidden": job["hidden"], "seconds": seconds,
        "extra_peak_mib": extra / MIB, "inputs_and_gradients_mib": (before + gradients) / MIB,
        "loss_per_token": total.item() / count.item(), "count": count.item(),
        "loss_error_64_tokens": abs(again.item() / truth.item() - 1),
        "hidden_gradient_error_64_tokens": relative(student_hidden.grad[some], hidden.grad),
        "weight_gradient_identity_error": _identity_error(student_hidden, student_weight),
        "one_logits_tensor_gib": tokens * words * 4 / 2**30,
    }  # fmt: skip
