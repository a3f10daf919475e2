"""What the stages of one run share: the data, the teacher, students, held-out batches. Built on first use."""

from __future__ import annotations

import dataclasses
import fcntl
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_qad import agreement, runtime
from nemo_qad.data.datasets import held_out_batches, training_batches
from nemo_qad.data.prepare import PreparedData, prepare
from nemo_qad.distillation.step import output_operands_of
from nemo_qad.evaluation.metrics import HeldOut, LogitsFn, ProjectedLogits, held_out
from nemo_qad.files import disk_errors, sha256
from nemo_qad.huggingface.load import load_weights, mark_dtypes
from nemo_qad.huggingface.source import Dtypes, listing
from nemo_qad.models.build import build_model, evaluating
from nemo_qad.models.forward import Ranks, whole_hidden
from nemo_qad.models.placement import expert_biases
from nemo_qad.models.whole import gather, own_parts, parameter_cut
from nemo_qad.quantization.sharded_scales import own_scales, whole_scales
from nemo_qad.quantization.student import deployed_weights, quantizer_state, restore_quantizers
from nemo_qad.schema import ModelConfig, RecipeConfig, RunConfig
from nemo_qad.stages.folder import RunFolder
from nemo_qad.training.trainer import Batch

Projected = Callable[[Tensor], ProjectedLogits | None]

def peak_gib() -> float:
    """Peak resident memory so far, in GiB, of the rank that had most; a collective call."""
    return max(agreement.of_all(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20))


def _fingerprint(data: PreparedData) -> str:
    """Of the token files as this rank sees them: sizes, and the digests of their indices."""
    prefixes = (data.train_prefix, data.held_out_prefix)
    files = [Path(f"{prefix}.{kind}") for prefix in prefixes for kind in ("bin", "idx")]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        return f"no {missing[0]}"
    sizes = [path.stat().st_size for path in files]
    return f"token files of {sizes} bytes, indices {sha256(files[1])[:8]} {sha256(files[3])[:8]}"


@contextmanager
def cache_lock(cache: Path) -> Iterator[None]:
    """One builder at a time in the shared cache: a sweep's jobs wait instead of building twice.

    Of several ranks the first holds the lock, and the others go on: what they do inside must wait for the first.
    """
    if not agreement.is_first():
        yield
        return
    with disk_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / ".cache.lock").open("a") as lock:  # not the name of a run folder's: they may be one folder
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class Session:
    """One run in progress. `say` prints one line for a person."""

    def __init__(self, run: RunConfig, folder: RunFolder, say: Callable[[str], None]) -> None:
        self.run = run
        self.folder = folder
        self.say = say
        self.cache = Path(run.cache_dir or Path(run.output_dir) / "cache")
        # Set by the teacher stage, which every other stage needs.
        self.teacher_folder: Path | None = None
        self.teacher_digest = ""
        self.teacher_dtypes: Dtypes | None = None
        self.teacher_config: dict[str, Any] | None = None
        self._teacher: torch.nn.Module | None = None

    def know_teacher(self, known: dict[str, Any]) -> None:
        """Takes what the teacher stage found: path, digest, dtypes and config.json, in this run or an earlier one."""
        self.teacher_folder, self.teacher_digest = Path(known["path"]), known["digest"]
        self.teacher_dtypes = Dtypes(**known["dtypes"]) if "dtypes" in known else None
        self.teacher_config = known.get("config")

    @cached_property
    def data(self) -> PreparedData:
        def prepared() -> PreparedData:
            with cache_lock(self.cache):
                return prepare(self.run.data, self.run.model.vocab_size, self.cache, self.say)

        found = agreement.first_alone(prepared)
        agreement.require_same(f"in {found.train_prefix.parent}", _fingerprint(found))
        return found

    @property
    def sequence_length(self) -> int:
        """The longest sequence that any stage of this run feeds to a model."""
        run = self.run
        lengths = [run.qad.sequence_length, run.calibration.sequence_length, run.evaluation.sequence_length]
        return max(lengths if run.teacher.path else [*lengths, run.teacher.sequence_length])

    def build(self, *, balance_experts: bool = False) -> torch.nn.Module:
        """A fresh model. Only the teacher's training balances its experts: in distillation an auxiliary
        loss or a moving expert bias would pull the student away from the teacher's routing."""
        model = self.run.model
        if not balance_experts:
            still = dataclasses.replace(model.moe, aux_loss_coeff=0.0, bias_update_rate=0.0)
            model = dataclasses.replace(model, moe=still)
        module = build_model(model, self.run.parallel, sequence_length=self.sequence_length)
        if not balance_experts:
            for part in module.modules():
                if hasattr(part, "expert_bias"):
                    part.frozen_expert_bias = True
        return module

    def load_teacher(self) -> torch.nn.Module:
        """A model with the teacher's weights, to be frozen or quantised."""
        assert self.teacher_folder is not None, "the teacher stage runs first"
        module = self.build()
        rounded = load_weights(module, self.teacher_folder, self.run.model).rounded
        if rounded:
            self.say(f"teacher: FP32 in the folder, rounded to BF16 here: {listing(rounded)}")
        return module

    @property
    def teacher(self) -> torch.nn.Module:
        """The frozen teacher: loaded on first use, and again after `drop_teacher`."""
        if self._teacher is None:
            self._teacher = self.load_teacher().eval().requires_grad_(False)
        return self._teacher

    def drop_teacher(self) -> None:
        """Gives its memory back."""
        self._teacher = None

    def load_student(self, tensors: dict[str, Tensor]) -> torch.nn.Module:
        """The inverse of `student_tensors`."""
        module = self.build()
        if self.teacher_dtypes is not None:
            mark_dtypes(module, self.teacher_dtypes, self.run.model)
        load_student_tensors(module, tensors, self.run.recipe, self.run.model)
        return module

    @cached_property
    def _held_out(self) -> tuple[list[Batch], list[Batch]]:
        """Validation chooses weights, evaluation judges them: never the same text."""
        run, size = self.run, self.run.evaluation.micro_batch_size
        num_validation = -(-run.qad.validation_samples // size) * size
        batches = held_out_batches(
            self.data,
            sequence_length=run.evaluation.sequence_length,
            micro_batch_size=size,
            num_samples=num_validation + run.evaluation.held_out_samples,
        )
        return batches[: num_validation // size], batches[num_validation // size :]

    @property
    def validation_batches(self) -> list[Batch]:
        return self._held_out[0]

    @property
    def evaluation_batches(self) -> list[Batch]:
        return self._held_out[1]

    def projected(self, module: torch.nn.Module) -> Projected:
        """A model's logits, made where they are looked at; None on a pipeline stage before the last.

        Every rank calls with the same tokens, or data-parallel ranks each with as many batches of their own.
        """
        group, vocab_size = Ranks.of(module).groups.tp, self.run.model.vocab_size

        def hidden(tokens_BS: Tensor) -> ProjectedLogits | None:
            with evaluating(module):
                hidden_BSD = whole_hidden(module, tokens_BS.to(runtime.device()))
                if hidden_BSD is None:
                    return None
                hidden_BSD, weight_vD = output_operands_of(module, hidden_BSD)
            return ProjectedLogits(hidden_BSD, weight_vD, vocab_size, group)

        return hidden

    def held_out(self, student: torch.nn.Module, teacher: LogitsFn | None, batches: list[Batch]) -> HeldOut:
        """Measures on batches dealt out over data-parallel ranks; the same on every rank.

        Args:
            teacher: to be called once for each of `deal(batches)`, in their order.
        """
        return held_out(self.projected(student), teacher, self.deal(student, batches), Ranks.of(student).total)

    def deal(self, module: torch.nn.Module, batches: list[Batch]) -> list[Batch]:
        """This data-parallel rank's batches, as many as each rank's."""
        shared = [(batches[number], counts) for number, counts in Ranks.of(module).share(len(batches))]
        return [b if counts else {**b, "loss_mask": torch.zeros_like(b["loss_mask"])} for b, counts in shared]

    @cached_property
    def _teacher_on_validation(self) -> list[ProjectedLogits | None]:
        """Hidden states, kept as dense QAD asks for them at each validation."""
        teacher = self.projected(self.teacher)
        return [teacher(batch["tokens"]) for batch in self.deal(self.teacher, self.validation_batches)]

    def _validation_teacher(self) -> LogitsFn:
        """The teacher on the validation batches, to be called once a batch in their order."""
        if self.run.qad.loss.is_sparse:  # asked for once, by PTQ
            return self.projected(self.teacher)
        remembered = iter(self._teacher_on_validation)
        return lambda _: next(remembered)

    def validate(self, student: torch.nn.Module) -> tuple[float, float]:
        """Held-out KL (nats per token) and perplexity of the weights that would ship: BF16 or quantised.

        Raises:
            UserError: they are not finite.
        """
        teacher = self._validation_teacher()
        with deployed_weights(student):
            measured = self.held_out(student, teacher, self.validation_batches)
        assert measured.kl is not None
        return measured.kl, measured.perplexity

    def calibration_batches(self) -> Iterator[Batch]:
        calibration = self.run.calibration
        return training_batches(
            self.data,
            sequence_length=calibration.sequence_length,
            micro_batch_size=calibration.micro_batch_size,
            num_samples=calibration.num_samples,
            seed=self.run.seed + 1,  # other samples first than those that QAD starts with
        )


def student_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Weights, expert biases and quantizer scales of a student, as `load_student_tensors` takes them.

    Whole tensors by global names on the first rank, nothing on the others: a collective call.
    """
    weights = gather(module, dict(module.named_parameters()), parameter_cut(module))
    biases = gather(module, expert_biases(module), lambda name: None)
    scales = whole_scales(module, quantizer_state(module))
    tensors = {f"main.{name}": value for name, value in weights.items()}
    tensors |= {f"buffer.{name}": value for name, value in biases.items()}
    return tensors | {f"quantizer.{name}": value for name, value in scales.items()}


@torch.no_grad()
def load_student_tensors(
    module: torch.nn.Module, tensors: dict[str, Tensor], recipe: RecipeConfig, model: ModelConfig
) -> None:
    """Makes a plain model, or a rank's part of one, the student whose whole tensors were saved, in any layout.

    Raises:
        KeyError: a weight is missing. UserError: scales that do not fit.
    """
    whole: dict[str, dict[str, Tensor]] = {"main": {}, "buffer": {}, "quantizer": {}}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        whole[kind][rest] = tensor
    for kind, own, cut in (
        ("main", dict(module.named_parameters()), parameter_cut(module)),
        ("buffer", expert_biases(module), lambda name: None),
    ):
        shapes = {name: tensor.shape for name, tensor in own.items()}
        for name, value in own_parts(module, shapes, whole[kind], cut).items():
            own[name].copy_(value)
    restore_quantizers(module, recipe, model, own_scales(module, whole["quantizer"]))
