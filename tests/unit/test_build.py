"""The built model: initial values, causality, what training alone may change, and refused layouts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from nemo_qad import runtime
from nemo_qad.errors import ConfigError
from nemo_qad.models.build import build_model, forward_hidden, forward_logits, logits_fn, stage_pattern
from nemo_qad.models.vocabulary import padded_vocab_size
from nemo_qad.schema import AttentionConfig, MambaConfig, ModelConfig, MoeConfig, ParallelConfig, Precision

ONE_RANK = ParallelConfig(name="one")


def small_model(**changes: object) -> ModelConfig:
    fields: dict = {
        "name": "small",
        "hybrid_pattern": "ME*-",
        "hidden_size": 32,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "ffn_hidden_size": 48,
        "precision": Precision.fp32,
        "init_std": 0.1,
        "attention": AttentionConfig(num_heads=4, num_query_groups=2, head_dim=8),
        "mamba": MambaConfig(num_heads=64, head_dim=4, num_groups=2, state_dim=4, chunk_size=8),
        "moe": MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=16, shared_expert_ffn_hidden_size=24),
    }
    return ModelConfig(**(fields | changes))


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with runtime.process_groups(ONE_RANK, seed=1, threads=1):
        yield


@pytest.fixture
def module() -> torch.nn.Module:
    return build_model(small_model(), ONE_RANK, sequence_length=20)


def tokens(length: int = 20) -> torch.Tensor:
    return torch.randint(0, 100, (3, length), generator=torch.Generator().manual_seed(4))


def test_logits_equal_megatrons_own_forward(module: torch.nn.Module) -> None:
    module.eval()
    with torch.no_grad():
        theirs = module(tokens(), None, None)
        torch.testing.assert_close(forward_logits(module, tokens()), theirs, rtol=1e-5, atol=1e-6)
        hidden = forward_hidden(module, tokens())
    torch.testing.assert_close(hidden @ module.output_layer.weight.t(), theirs, rtol=1e-5, atol=1e-6)


def test_tied_output_layer_reads_the_embedding() -> None:
    tied = build_model(small_model(tied_output=True), ONE_RANK, sequence_length=20).eval()
    with torch.no_grad():
        hidden, logits = forward_hidden(tied, tokens()), forward_logits(tied, tokens())
    torch.testing.assert_close(logits, hidden @ tied.embedding.word_embeddings.weight.t(), rtol=1e-5, atol=1e-6)


def test_later_tokens_do_not_reach_earlier_logits(module: torch.nn.Module) -> None:
    logits = logits_fn(module, 100)
    changed = tokens()
    changed[:, 11] = (changed[:, 11] + 1) % 100
    before, after = logits(tokens()), logits(changed)
    torch.testing.assert_close(before[:, :11], after[:, :11], rtol=1e-5, atol=1e-6)
    assert ((before - after)[:, 11:].abs().amax(-1) > 1e-4).all()  # the change itself and the memory of it


def test_logits_fn_keeps_mode_and_cuts_padding(module: torch.nn.Module) -> None:
    for training in (True, False):
        module.train(training)
        logits = logits_fn(module, 100)(tokens())
        assert logits.shape == (3, 20, 100) and logits.dtype == torch.float32 and not logits.requires_grad
        assert module.training is training
    assert module.decoder.layers[1].mlp.router.local_tokens_per_expert.sum() == 0


@pytest.mark.parametrize("precision", list(Precision))
def test_initial_values_are_megatrons(precision: Precision) -> None:
    mixer = build_model(small_model(precision=precision), ONE_RANK, sequence_length=8).decoder.layers[0].mixer
    steps = F.softplus(mixer.dt_bias.float())
    assert steps.min() > 0.9e-3 and steps.max() < 0.105 and steps.std() > 0.01
    decay = mixer.A_log.exp()
    assert decay.min() >= 1 and decay.max() <= 16 and decay.std() > 2
    assert torch.equal(mixer.D, torch.ones(64))
    assert mixer.A_log.dtype == mixer.D.dtype == torch.float32


def test_bf16_model_trains() -> None:
    module = build_model(small_model(precision=Precision.bf16), ONE_RANK, sequence_length=20).train()
    logits = forward_logits(module, tokens())
    assert logits.dtype == torch.bfloat16
    F.cross_entropy(logits.float().flatten(0, 1), tokens().flatten()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in module.parameters())


def router_gradient(module: torch.nn.Module) -> torch.Tensor:
    module.zero_grad()
    forward_logits(module, tokens()).square().mean().backward()
    router = module.decoder.layers[1].mlp.router
    assert router.weight.grad is not None
    return router.weight.grad.clone()


def test_auxiliary_loss_and_expert_counts_belong_to_training(module: torch.nn.Module) -> None:
    router = module.decoder.layers[1].mlp.router
    module.eval()
    evaluated = router_gradient(module)  # gradients on, as for a frozen teacher inside a training step
    assert router.local_tokens_per_expert.sum() == 0
    module.train()
    trained = router_gradient(module)
    assert router.local_tokens_per_expert.sum() == 3 * 20 * 2
    assert (trained - evaluated).abs().max() > 1e-6
    with torch.no_grad():
        forward_logits(module, tokens())
    assert router.local_tokens_per_expert.sum() == 3 * 20 * 2
    module.config.moe_aux_loss_coeff = 0.0
    torch.testing.assert_close(router_gradient(module), evaluated)


def test_same_seed_same_parameters() -> None:
    runtime.set_seeds(9)
    first = build_model(small_model(), ONE_RANK, sequence_length=8).state_dict()
    runtime.set_seeds(9)
    second = build_model(small_model(), ONE_RANK, sequence_length=8).state_dict()
    for name, tensor in first.items():
        if torch.is_tensor(tensor):
            assert torch.equal(tensor, second[name]), name



def test_stage_pattern_splits_evenly() -> None:
    assert stage_pattern("ME*ME", 1) == "ME*ME"
    assert stage_pattern("ME*ME", 2) == "ME*|ME"
    assert [len(part) for part in stage_pattern("M" * 52, 8).split("|")] == [7, 7, 7, 7, 6, 6, 6, 6]
    with pytest.raises(ConfigError, match=r"parallel\.pipeline=6"):
        stage_pattern("ME*ME", 6)


def test_padded_vocabulary() -> None:
    assert padded_vocab_size(small_model()) == 128
    assert padded_vocab_size(small_model(vocab_size=129), tensor_parallel=2) == 256
    assert padded_vocab_size(small_model(vocab_size=256), tensor_parallel=2) == 256
