"""Golden answers beside an export: what the student says next after 64 prompts, for whoever serves it.

EXPORT/golden/prompts.json has each prompt's token ids and its most likely next tokens, logits.safetensors all logits
(FP32 [P, V]), compare.py asks an engine and compares. They lie in a folder of their own, as engines read every
safetensors file beside config.json.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nemo_qad.data import tokenizer
from nemo_qad.files import readable
from nemo_qad.huggingface import compare

NUM_PROMPTS = 64
NUM_TOKENS = 64  # of each prompt's answer, in prompts.json
FOLDER = "golden"
_STEP = 7  # prompts end at different places, as kernels work in blocks

Rows = Callable[[Tensor, Tensor], Tensor | None]  # tokens [B, S], mask [B, S] -> logits [N, V] of the masked tokens


@dataclass(frozen=True)
class Golden:
    """Prompts (token ids) and the FP32 logits [P, V] of the token after each."""

    prompts: list[list[int]]
    logits_PV: Tensor


def places(num_rows: int, length: int) -> list[tuple[int, int]]:
    """(row, last position) of each prompt, in order; no two are alike where rows and length allow."""
    half = max(length // 2, 1)
    numbers = [divmod(number, num_rows) for number in range(NUM_PROMPTS)]
    return sorted({(row, length - 1 - (row * _STEP + turn) % half) for turn, row in numbers})


@torch.no_grad()
def ask(rows: Rows, batches: Iterable[Tensor], num_rows: int, share: Callable[[Tensor | None], Tensor]) -> Golden:
    """The student's answers; a collective call of the ranks that hold it.

    Args:
        rows: the student. batches: int64 tokens [B, S], `num_rows` rows in all.
        share: brings what the last pipeline stage found to all ranks.
    """
    prompts, found, first = [], [], 0
    for tokens_BS in batches:
        mask_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
        for row, last in places(num_rows, tokens_BS.shape[1]):
            if first <= row < first + len(tokens_BS):
                mask_BS[row - first, last] = True
                prompts.append(tokens_BS[row - first, : last + 1].tolist())
        first += len(tokens_BS)
        logits_NV = rows(tokens_BS, mask_BS)
        found.append(share(None if logits_NV is None else logits_NV.float().cpu()))
    return Golden(prompts, torch.cat(found))


def write(golden: Golden, folder: Path, tokenizer_folder: Path | None) -> None:
    """Writes FOLDER/golden."""
    target = folder / FOLDER
    target.mkdir()
    words = None if tokenizer_folder is None else tokenizer.load(tokenizer_folder)

    def text(ids: list[int]) -> str:
        return "" if words is None else words.decode(ids, skip_special_tokens=False)

    log_prob_PV = golden.logits_PV.double().log_softmax(-1)
    top = log_prob_PV.topk(min(NUM_TOKENS, log_prob_PV.shape[-1]))
    answers = []
    for ids, values, tokens in zip(golden.prompts, top.values.tolist(), top.indices.tolist(), strict=True):
        named = [{"id": t, "text": text([t]), "log_prob": round(v, 6)} for t, v in zip(tokens, values, strict=True)]
        answers.append({"ids": ids, "text": text(ids), "top": named})
    (target / "prompts.json").write_text(json.dumps({"prompts": answers}, ensure_ascii=False) + "\n", encoding="utf-8")
    save_file({"logits": golden.logits_PV.contiguous()}, target / "logits.safetensors")
    readable(target / "logits.safetensors")
    shutil.copyfile(compare.__file__, target / "compare.py")
