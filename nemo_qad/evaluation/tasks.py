"""Tasks that a small model can be scored on: two about real text, and the generated ones.

next_line     which of four lines of held-out code follows: one that does, three of the same indentation
              from elsewhere. Judged by mean log-likelihood a token. Chance 1/4.
intact_line   which of four versions of a held-out line has its words in order: the line, or one of three in
              which two neighbouring words have changed places. Judged by summed log-likelihood. Chance 1/4.
generated     the one right answer, every token of it the model's first choice given the right tokens before
              it. That equals greedy decoding: up to the first mistake both see the same tokens.

N questions, C choices, S sequence, V vocabulary.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from nemo_qad.data import generated, indexed, tokenizer
from nemo_qad.data.prepare import PreparedData
from nemo_qad.errors import ConfigError, UserError

LogitsFn = Callable[[Tensor], Tensor]  # tokens int64 [B, S] -> logits float32 [B, S, V]

NUM_CHOICES = 4
CONTEXT_LINES = 6  # lines before the line in question, of which
MAX_CONTEXT = 40  # the last tokens are shown
MIN_LINE, MAX_LINE = 4, 24  # tokens of a line in question
MIN_WORDS = 4  # of a line whose words are to change places
GRANULE = 16  # sequences are padded to a multiple of this


@dataclass(frozen=True)
class Question:
    """Prompt tokens and the tokens of each choice; `correct` is the index of the right one."""

    prompt: list[int]
    choices: list[list[int]]
    correct: int


@dataclass(frozen=True)
class Task:
    """Questions as tensors.

    `tokens`, `labels` int64 [N, C, S]; `mask` bool [N, C, S], where labels belong to a choice; `correct`
    int64 [N]. C = 1: exact match; C > 1: the choice of the highest log-likelihood, a token's mean if
    `normalised`. `chance`: the expected score of a guess.
    """

    name: str
    chance: float
    normalised: bool
    tokens: Tensor
    labels: Tensor
    mask: Tensor
    correct: Tensor


@torch.no_grad()
def score(task: Task, logits_fn: LogitsFn, micro_batch_size: int) -> Tensor:
    """Which questions are answered right, bool [N] on the CPU.

    A tie between choices, or logits that are not numbers, count as wrong.
    """
    num_questions, num_choices, length = task.tokens.shape
    tokens_MS = task.tokens.reshape(-1, length)
    labels_MS = task.labels.reshape(-1, length)
    mask_MS = task.mask.reshape(-1, length)
    results = []
    for start in range(0, len(tokens_MS), micro_batch_size):
        part = slice(start, start + micro_batch_size)
        mask_BS = mask_MS[part]
        labels_N = labels_MS[part][mask_BS]
        logits_BSV = logits_fn(tokens_MS[part])
        logits_NV = logits_BSV[mask_BS.to(logits_BSV.device)].float().cpu()
        if num_choices == 1:
            values_N = (logits_NV.argmax(dim=-1) != labels_N) | logits_NV.isnan().any(dim=-1)
        else:
            values_N = logits_NV.log_softmax(dim=-1).gather(-1, labels_N[:, None])[:, 0].double()
        rows_N = mask_BS.nonzero()[:, 0]
        results.append(torch.zeros(len(mask_BS), dtype=torch.float64).index_add_(0, rows_N, values_N.double()))
    totals_NC = torch.cat(results).reshape(num_questions, num_choices)
    if num_choices == 1:
        return totals_NC[:, 0] == 0
    if task.normalised:
        totals_NC = totals_NC / task.mask.sum(dim=-1)
    right_N = totals_NC.gather(1, task.correct[:, None])[:, 0]
    others_NC = totals_NC.scatter(1, task.correct[:, None], -torch.inf)
    return right_N > others_NC.max(dim=1).values


def build_tasks(
    prepared: PreparedData, *, num_questions: int, sequence_length: int, seed: int
) -> list[Task]:
    """The tasks, the same for the same data and arguments; each has `num_questions` distinct questions.

    Raises:
        ConfigError: the questions are longer than `sequence_length`.
        UserError: the held-out text has too few suitable lines.
    """
    if num_questions < 1:
        raise ConfigError("evaluation.num_questions", num_questions, "no questions", "Give at least 1.")
    bpe = tokenizer.load(prepared.tokenizer_folder)
    end = tokenizer.end_of_document(bpe, prepared.tokenizer_folder)
    start = [] if end is None else [end]
    tasks = []
    for name, questions in line_questions(prepared, bpe, start, num_questions, seed).items():
        if len(questions) < num_questions:
            raise UserError(
                f"Task {name}: the held-out text {prepared.held_out_prefix} gives {len(questions)} questions, "
                f"{num_questions} are asked for: lower evaluation.num_questions or raise data.held_out_fraction."
            )
        tasks.append(_task(name, 1 / NUM_CHOICES, questions, sequence_length))
    for spec in generated.TASKS:
        examples = generated.questions(spec, num_questions, seed)
        questions = [Question(start + _ids(bpe, e.prompt), [_ids(bpe, e.answer)], 0) for e in examples]
        tasks.append(_task(spec.name, spec.chance, questions, sequence_length))
    return tasks


def line_questions(
    prepared: PreparedData, bpe: Tokenizer, start: list[int], num_questions: int, seed: int
) -> dict[str, list[Question]]:
    """Up to `num_questions` questions of each task about lines of the held-out text, by task name."""
    special = {i for i, token in bpe.get_added_tokens_decoder().items() if token.special}
    documents = [
        bpe.decode([t for t in document.tolist() if t not in special]).splitlines()
        for document in indexed.check(prepared.held_out_prefix).documents()
    ]
    pool = _LinePool(bpe, documents)
    rng = random.Random(f"lines-{seed}")
    places = [(lines, i) for lines in documents for i in range(1, len(lines)) if lines[i - 1].strip()]
    rng.shuffle(places)
    makers = {"next_line": pool.others, "intact_line": _swapped_words}
    made: dict[str, dict[str, Question]] = {name: {} for name in makers}
    for lines, number in places:
        line = lines[number]
        if not MIN_LINE <= pool.length.get(line, 0) <= MAX_LINE:
            continue
        prompt = start + _ids(bpe, "\n".join(lines[max(0, number - CONTEXT_LINES) : number]))[-MAX_CONTEXT:]
        for name, wrong_versions in makers.items():
            if len(made[name]) >= num_questions or line in made[name]:
                continue
            wrong = wrong_versions(line, rng)
            if len(wrong) == NUM_CHOICES - 1:
                correct = rng.randrange(NUM_CHOICES)
                versions = [*wrong[:correct], line, *wrong[correct:]]
                # The line break belongs to the choice: so the prompt's tokens are the same for all of them.
                choices = [_ids(bpe, f"\n{version}") for version in versions]
                made[name][line] = Question(prompt, choices, correct)
        if all(len(questions) >= num_questions for questions in made.values()):
            break
    return {name: list(questions.values()) for name, questions in made.items()}


class _LinePool:
    """Distinct lines of the held-out text by indentation and length, to draw wrong answers from."""

    def __init__(self, bpe: Tokenizer, documents: list[list[str]]) -> None:
        lines = sorted({line for document in documents for line in document if line.strip()})
        encodings = bpe.encode_batch([f"\n{line}" for line in lines], add_special_tokens=False)
        self.length = {line: len(e.ids) for line, e in zip(lines, encodings, strict=True)}
        self.alike: dict[tuple[int, int], list[str]] = {}
        for line, length in self.length.items():
            self.alike.setdefault((_indentation(line), length), []).append(line)

    def others(self, line: str, rng: random.Random) -> list[str]:
        """Other lines of the same indentation, within one token of the same length; fewer if there are few."""
        found: list[str] = []
        for length in range(self.length[line] - 1, self.length[line] + 2):
            found += self.alike.get((_indentation(line), length), [])
        found = [other for other in found if other != line]
        return rng.sample(found, min(NUM_CHOICES - 1, len(found)))


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _swapped_words(line: str, rng: random.Random) -> list[str]:
    """Versions of the line in which two neighbouring words have changed places; fewer if there are few."""
    parts = re.split(r"(\s+)", line.rstrip())
    words = [i for i, part in enumerate(parts) if part and not part.isspace()]
    if len(words) < MIN_WORDS:
        return []
    versions = set()
    for left, right in itertools.pairwise(words):
        swapped = list(parts)
        swapped[left], swapped[right] = parts[right], parts[left]
        versions.add("".join(swapped))
    versions.discard(line.rstrip())
    return rng.sample(sorted(versions), min(NUM_CHOICES - 1, len(versions)))


def _ids(bpe: Tokenizer, text: str) -> list[int]:
    return bpe.encode(text, add_special_tokens=False).ids


def _task(name: str, chance: float, questions: list[Question], sequence_length: int) -> Task:
    """Pads the questions on the right to one length: causal models do not see what comes after."""
    longest = max(len(q.prompt) + len(choice) for q in questions for choice in q.choices) - 1
    length = min(-(-longest // GRANULE) * GRANULE, sequence_length)
    if longest > length:
        raise ConfigError(
            "evaluation.sequence_length",
            sequence_length,
            f"task {name} has a question of {longest} tokens",
            f"Give at least {longest}.",
        )
    shape = (len(questions), len(questions[0].choices), length)
    tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    for n, question in enumerate(questions):
        for c, choice in enumerate(question.choices):
            text = torch.tensor(question.prompt + choice)
            tokens[n, c, : len(text) - 1] = text[:-1]
            labels[n, c, : len(text) - 1] = text[1:]
            mask[n, c, len(question.prompt) - 1 : len(text) - 1] = True
    correct = torch.tensor([question.correct for question in questions])
    return Task(name, chance, name == "next_line", tokens, labels, mask, correct)
