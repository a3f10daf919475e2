"""Programs that test_bridge.py runs in processes of their own; the last line each prints is one JSON object.

`pretrain` trains with Megatron-Bridge itself. Its environment cannot be that of the other tests, as Bridge 0.6.2
wants transformers <= 5.12.1. On a machine without a GPU this one is enough (beside this project's own packages):

    pip install --no-deps megatron-bridge==0.6.2 transformers==5.12.1 "tokenizers<0.23" "huggingface-hub<2" \\
        httpx httpcore datasets multiprocess pandas pyarrow dill xxhash ipython traitlets

`ranks` runs the forward step alone, on two ranks that torchrun has started.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from small_model import small_model
from torch import Tensor, nn

from nemo_qad import cpu, runtime
from nemo_qad.distillation.bridge import DistillationForwardStep
from nemo_qad.distillation.kl import reference_kl
from nemo_qad.schema import ModelConfig, ParallelConfig

SKIPPED = 77  # exit status: Bridge cannot be imported; the last line says why
SEQUENCE_LENGTH = 32
# Bridge imports these whether it needs them or not: kernels, fault tolerance and a data loader for other media.
OPTIONAL = ("transformer_engine", "transformer_engine_torch", "nvidia_resiliency_ext", "megatron.energon")


class StandIn(ModuleType):
    """A package that is imported but not used: any name can be subclassed, none can be called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (nn.Module,), {}) if name[0].isupper() else StandIn(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        absent = any(name == package or name.startswith(package + ".") for package in self.packages)
        return ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return


def import_bridge() -> None:
    """Imports Bridge, with stand-ins for what it cannot do without here, and prepares it for the CPU."""
    cpu.install()
    for module in ("megatron.core.dist_checkpointing", "modelopt.torch.distill.plugins.megatron"):
        importlib.import_module(module)  # these look for the real packages, so before there are stand-ins

    absent = tuple(package for package in OPTIONAL if importlib.util.find_spec(package) is None)
    sys.meta_path.insert(0, StandInFinder(absent))
    logging.disable(logging.INFO)
    import megatron.bridge.training.pretrain  # noqa: F401

    if torch.cuda.is_available():
        return
    from megatron.bridge.data import loaders
    from megatron.bridge.training import eval as evaluation
    from megatron.bridge.training import initialize, setup, train
    from megatron.bridge.training.utils import train_utils

    setup.initialize_megatron = partial(setup.initialize_megatron, allow_no_cuda=True)
    initialize.compile_helpers = initialize._warmup_jit_function = lambda *args, **kwargs: None
    for module in (setup, train, train_utils, evaluation, loaders):
        vars(module)["torch"] = cpu._CpuFactories()


def bridge_model(num_layers: int) -> Any:
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return GPTModelProvider(
        num_layers=num_layers, hidden_size=32, num_attention_heads=4, seq_length=SEQUENCE_LENGTH, init_method_std=0.2,
        vocab_size=100, should_pad_vocab=True, make_vocab_size_divisible_by=128, position_embedding_type="rope",
        transformer_layer_spec=get_gpt_layer_local_spec(), share_embeddings_and_output_weights=False,
        calculate_per_token_loss=True, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.float32,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
    )  # fmt: skip


def bridge_config(*, overlap: bool) -> Any:
    """Bridge's configuration of four steps. `overlap`: parameters are gathered by DDP's hooks during forward."""
    from megatron.bridge.training import config
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    return config.ConfigContainer(
        train=config.TrainingConfig(micro_batch_size=2, global_batch_size=4, train_iters=4),
        validation=config.ValidationConfig(eval_interval=2, eval_iters=1),
        model=bridge_model(1),
        optimizer=config.OptimizerConfig(lr=1e-2, min_lr=1e-3, use_distributed_optimizer=overlap),
        scheduler=config.SchedulerConfig(
            lr_decay_style="constant", lr_warmup_iters=0, start_weight_decay=0.0, end_weight_decay=0.0
        ),
        ddp=config.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=overlap, overlap_param_gather=overlap,
            overlap_grad_reduce=overlap, average_in_collective=False,
        ),
        dataset=config.MockGPTDatasetConfig(
            random_seed=1, seq_length=SEQUENCE_LENGTH, reset_position_ids=False, reset_attention_mask=False,
            eod_mask_loss=False, num_workers=0, dataloader_type="single",
            skip_getting_attention_mask_from_dataset=False,
        ),
        logger=config.LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100),
        checkpoint=config.CheckpointConfig(save=None),
        dist=config.DistributedInitConfig(distributed_backend="nccl" if torch.cuda.is_available() else "gloo"),
    )  # fmt: skip


class CheckedForwardStep(DistillationForwardStep):
    """Masks tokens, many or few in turn, and computes every loss and gradient once more from full logits."""

    calls = 0

    def start(self) -> None:
        self.total, self.count, self.gradients = 0.0, 0, None

    def __call__(self, data_iterator: Iterator[dict[str, Any]], model: Any, return_schedule_plan: bool = False) -> Any:
        batch = next(data_iterator)
        self.calls += 1
        share = (0.9, 0.3)[self.calls % 2]
        drawn = torch.rand(batch["loss_mask"].shape, generator=torch.Generator().manual_seed(self.calls))
        batch["loss_mask"] = (drawn < share).float()
        result = super().__call__(iter([batch]), model, return_schedule_plan)
        if model.training:
            total, count = full_logits_kl(self.teacher, model, batch, self.settings["vocab_size"])
            parameters = [p for p in model.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(total, parameters)
            previous = self.gradients or [torch.zeros_like(g) for g in gradients]
            self.gradients = [a + b for a, b in zip(previous, gradients, strict=True)]
            self.total, self.count = self.total + float(total.detach()), self.count + int(count)
        return result


def full_logits_kl(teacher: Any, student: Any, batch: dict[str, Any], vocab_size: int) -> tuple[Tensor, Tensor]:
    device = next(student.parameters()).device
    names = ("tokens", "position_ids", "attention_mask")
    inputs = [None if batch.get(name) is None else batch[name].to(device) for name in names]
    with torch.no_grad():
        teacher_TW = teacher(*inputs, runtime_gather_output=True).flatten(0, 1)
    student_TW = student(*inputs, runtime_gather_output=True).flatten(0, 1)
    return reference_kl(teacher_TW, student_TW, batch["loss_mask"].to(device).flatten(), vocab_size=vocab_size)


def pretrain(*, overlap: bool) -> dict[str, Any]:
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.pretrain import pretrain as bridge_pretrain
    from megatron.bridge.training.state import GlobalState
    from megatron.bridge.training.utils.train_utils import prepare_forward_step_func

    def teacher() -> nn.Module:
        provider = bridge_model(2)
        provider.finalize()
        return provider.provide_distributed_model(wrap_with_ddp=False)[0]

    step = CheckedForwardStep(teacher, vocab_size=100)
    steps, evaluations = [], []

    class Record(Callback):
        def on_train_step_start(self, context: Any) -> None:
            step.start()

        def on_train_step_end(self, context: Any) -> None:
            norm = torch.stack([(g / step.count).norm() for g in step.gradients]).norm()
            ours = {"loss": float(context.loss_dict["kl"]), "norm": float(context.grad_norm)}
            steps.append({**ours, "expected_loss": step.total / step.count, "expected_norm": float(norm)})

        def on_eval_end(self, context: Any) -> None:
            evaluations.append(float(context.total_loss_dict["kl"]))

    accepted = prepare_forward_step_func(step, GlobalState()) is step
    with runtime.process_groups(ParallelConfig(name="single"), seed=1, threads=1):
        bridge_pretrain(bridge_config(overlap=overlap), step, callbacks=[Record()])
    return {"accepted": accepted, "steps": steps, "evaluations": evaluations}


def ranks(kind: str) -> dict[str, Any]:
    """The loss on two ranks and that of the full logits.

    `tensor`: under tensor and sequence parallelism, with the largest relative error of a gradient. `context`: under
    context parallelism, of a model whose layers look at one token at a time.
    """
    parallel = ParallelConfig(name="two", ranks_per_node=2, **{kind: 2})
    batch = random_batch()
    with runtime.process_groups(parallel, seed=1, threads=1):
        config = small_model(hybrid_pattern="M*-" if kind == "tensor" else "--")
        teacher, student = (hybrid(config, parallel, seed).train() for seed in (1, 2))
        parameters = list(student.parameters())
        step = DistillationForwardStep(teacher, vocab_size=250)
        output, loss = step(iter([batch]), student)
        total, count, _ = loss(output)
        gradients = torch.autograd.grad(total, parameters)
        if kind == "context":  # each rank has half of the tokens
            total, count = total.detach(), count.clone()
            dist.all_reduce(total)
            dist.all_reduce(count)
        truth, true_count = full_logits_kl(teacher, student, batch, 250)
        result = {
            "loss": float(total.detach()),
            "expected_loss": float(truth.detach()),
            "counts": [int(count), int(true_count)],
        }
        if kind == "tensor":
            exact = torch.autograd.grad(truth, parameters)
            errors = [float((a - b).norm() / b.norm()) for a, b in zip(gradients, exact, strict=True)]
            result["gradient_error"] = max(errors)
        return result


def hybrid(config: ModelConfig, parallel: ParallelConfig, seed: int) -> nn.Module:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from nemo_qad.models.build import transformer_config
    from nemo_qad.models.hybrid import torch_spec
    from nemo_qad.models.vocabulary import padded_vocab_size

    runtime.set_seeds(seed)
    module = HybridModel(
        transformer_config(config, parallel), torch_spec(config), padded_vocab_size(config, parallel.tensor),
        SEQUENCE_LENGTH, hybrid_layer_pattern=config.hybrid_pattern, share_embeddings_and_output_weights=False,
        position_embedding_type="none",
    )  # fmt: skip
    with torch.no_grad():
        module.output_layer.weight.mul_(10)  # distributions that differ
    return module


def random_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (3, SEQUENCE_LENGTH)
    mask = (torch.rand(shape, generator=generator) < 0.6).float()
    return {"tokens": torch.randint(0, 250, shape, generator=generator), "loss_mask": mask}


def main(program: str, argument: str) -> None:
    if program == "pretrain":
        try:
            import_bridge()
        except ImportError as error:
            print(f"megatron-bridge cannot be imported: {error}")
            sys.exit(SKIPPED)
        result = pretrain(overlap=argument == "overlap")
    else:
        result = ranks(argument)
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
