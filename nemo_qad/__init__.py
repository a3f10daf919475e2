"""Quantization-aware distillation of language models to NVFP4, on Megatron-Core."""

__version__ = "0.1.0"
