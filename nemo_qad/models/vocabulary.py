"""Size of the padded vocabulary; needs neither torch nor Megatron-Core."""

from __future__ import annotations

from nemo_qad.schema import ModelConfig


def padded_vocab_size(model: ModelConfig, tensor_parallel: int = 1) -> int:
    """Rows of the embedding: the vocabulary, rounded up so that each tensor-parallel rank holds whole multiples."""
    multiple = model.vocab_divisible_by * tensor_parallel
    return -(-model.vocab_size // multiple) * multiple
