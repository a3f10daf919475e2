"""Tasks that a small model can be scored on: two about real text, and the generated ones.

real_line     which of four versions of a held-out line is the real one; in each of the others one word is
              replaced by a word from elsewhere in the held-out text. Chance 1/4.
intact_line   which of four versions of a held-out line has its words in order; in each of the others two
              neighbouring words have changed places. Chance 1/4.
              Both show a few tokens of what comes before, and choose by summed log-likelihood among versions
              of equally many tokens. Chance is that of a guess; random likelihoods do worse (1/8 for
              real_line, whose right version must beat three independent changes of itself).
generated     the one right answer, every token of it the model's first choice given the right tokens before
              it. That equals greedy decoding: up to the first mistake both see the same tokens.

N questions, C choices, S sequence, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor

from nemo_qad.data import generated, indexed, tokenizer
from nemo_qad.data.prepare import PreparedData
from nemo_qad.errors import ConfigError, UserError
from nemo_qad.evaluation.metrics import LogitsFn

NUM_CHOICES = 4
MAX_CONTEXT = 12  # tokens shown of the line before the one in question
MAX_LINE = 20  # tokens of a version of a line, so that a question fits into 32
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
    int64 [N]. C = 1: exact match; C > 1: the choice of the highest log-likelihood. `chance`: the expected
    score of a guess. `rows_a_sample`: how many rows make about as many tokens as one evaluation sample.
    """

    name: str
    chance: float
    rows_a_sample: int
    tokens: Tensor
    labels: Tensor
    mask: Tensor
    correct: Tensor


class Spread(Protocol):
    """How batches are spread over ranks (`nemo_qad.models.forward.Ranks`)."""

    def share(self, count: int, /) -> list[tuple[int, bool]]:
        """The numbers below `count` that this rank does, and whether each is its own to count."""

    def merged(self, found: dict[int, Any], /) -> dict[int, Any]:
        """What all ranks found, by number."""


class Alone:
    """One rank does all."""

    def share(self, count: int) -> list[tuple[int, bool]]:
        return [(number, True) for number in range(count)]

    def merged(self, found: dict[int, Any]) -> dict[int, Any]:
        return found


@torch.no_grad()
def score(task: Task, logits_fn: LogitsFn, micro_batch_size: int, spread: Spread | None = None) -> Tensor:
    """Which questions are answered right, bool [N] on the CPU.

    `micro_batch_size` counts evaluation samples; short rows are put together to make as many tokens.
    A tie between choices, or logits that are not numbers, count as wrong. `spread`: over several ranks, all of which
    call together and get the same.
    """
    num_questions, num_choices, _ = task.tokens.shape
    spread, num_rows = spread or Alone(), micro_batch_size * task.rows_a_sample
    found = {}
    for number, counts in spread.share(math.ceil(num_questions * num_choices / num_rows)):
        values_B = _row_values(task, slice(number * num_rows, (number + 1) * num_rows), logits_fn)
        if counts and values_B is not None:
            found[number] = values_B
    found = spread.merged(found)
    totals_NC = torch.cat([found[number] for number in sorted(found)]).reshape(num_questions, num_choices)
    if num_choices == 1:
        return totals_NC[:, 0] == 0
    right_N = totals_NC.gather(1, task.correct[:, None])[:, 0]
    others_NC = totals_NC.scatter(1, task.correct[:, None], -torch.inf)
    return right_N > others_NC.max(dim=1).values


def _row_values(task: Task, rows: slice, logits_fn: LogitsFn) -> Tensor | None:
    """Of each row float64 [B]: how many of its tokens are wrong, or with choices its log-likelihood."""
    length = task.tokens.shape[-1]
    tokens_BS, labels_BS, mask_BS = (x.reshape(-1, length)[rows] for x in (task.tokens, task.labels, task.mask))
    labels_N = labels_BS[mask_BS]
    logits_BSV = logits_fn(tokens_BS)
    if logits_BSV is None:
        return None
    logits_NV = logits_BSV[mask_BS.to(logits_BSV.device)].float().cpu()
    if task.tokens.shape[1] == 1:
        values_N = (logits_NV.argmax(dim=-1) != labels_N) | logits_NV.isnan().any(dim=-1)
    else:
        values_N = logits_NV.log_softmax(dim=-1).gather(-1, labels_N[:, None])[:, 0]
    rows_N = mask_BS.nonzero()[:, 0]
    return torch.zeros(len(mask_BS), dtype=torch.float64).index_add_(0, rows_N, values_N.double())


def build_tasks(
    prepared: PreparedData, *, num_questions: int, sequence_length: int, seed: int, multiple: int = 1
) -> list[Task]:
    """The tasks, the same for the same data and arguments; each has `num_questions` distinct questions.

    Args:
        multiple: of the padded length of a question, which divides `sequence_length`.

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
        tasks.append(_task(name, 1 / NUM_CHOICES, questions, sequence_length, multiple))
    for spec in generated.TASKS:
        examples = generated.questions(spec, num_questions, seed)
        questions = [Question(start + _ids(bpe, e.prompt), [_ids(bpe, e.answer)], 0) for e in examples]
        tasks.append(_task(spec.name, spec.chance, questions, sequence_length, multiple))
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
    pool = _words_by_length(bpe, documents)
    rng = random.Random(f"lines-{seed}")
    places = [(lines, i) for lines in documents for i in range(1, len(lines)) if lines[i - 1].strip()]
    rng.shuffle(places)
    made: dict[str, dict[str, Question]] = {"real_line": {}, "intact_line": {}}
    for lines, number in places:
        line = lines[number].rstrip()
        candidates = {"real_line": _replaced_words(line, bpe, pool, rng), "intact_line": _swapped_words(line, rng)}
        for name, versions in candidates.items():
            if len(made[name]) < num_questions and line not in made[name]:
                # The line break belongs to the choice: so the prompt's tokens are the same for all of them.
                choices = _equally_long([_ids(bpe, f"\n{version}") for version in (line, *versions)])
                if len(choices) == NUM_CHOICES and len(choices[0]) <= MAX_LINE:
                    prompt = start + _ids(bpe, lines[number - 1])[-MAX_CONTEXT:]
                    correct = rng.randrange(NUM_CHOICES)
                    choices[0], choices[correct] = choices[correct], choices[0]
                    made[name][line] = Question(prompt, choices, correct)
        if all(len(questions) >= num_questions for questions in made.values()):
            break
    return {name: list(questions.values()) for name, questions in made.items()}


def _equally_long(choices: list[list[int]]) -> list[list[int]]:
    """The first choice and the next distinct ones of its length: a model must not win by counting tokens."""
    distinct = dict.fromkeys(tuple(choice) for choice in choices if len(choice) == len(choices[0]))
    return [list(choice) for choice in distinct][:NUM_CHOICES]


def _words_by_length(bpe: Tokenizer, documents: list[list[str]]) -> dict[int, list[str]]:
    """The distinct words of the text by their number of tokens."""
    words = sorted({word for lines in documents for line in lines for word in line.split() if _is_word(word)})
    pool: dict[int, list[str]] = {}
    for word, encoding in zip(words, bpe.encode_batch([f" {w}" for w in words]), strict=True):
        pool.setdefault(len(encoding.ids), []).append(word)
    return pool


def _is_word(text: str) -> bool:
    return len(text) > 1 and any(character.isalpha() for character in text)


def _parts(line: str) -> tuple[list[str], list[int]]:
    """The line cut at white space, white space kept, and which of the parts are not white space."""
    parts = re.split(r"(\s+)", line)
    return parts, [i for i, part in enumerate(parts) if part and not part.isspace()]


def _replaced_words(line: str, bpe: Tokenizer, pool: dict[int, list[str]], rng: random.Random) -> list[str]:
    """For each word of the line, in random order, the line with a word of as many tokens in its place."""
    parts, places = _parts(line)
    places = [place for place in places if _is_word(parts[place])]
    rng.shuffle(places)
    versions = []
    for place in places:
        others = pool.get(len(_ids(bpe, f" {parts[place]}")))
        if others:
            versions.append("".join([*parts[:place], rng.choice(others), *parts[place + 1 :]]))
    return versions


def _swapped_words(line: str, rng: random.Random) -> list[str]:
    """Every version of the line in which two neighbouring words have changed places, in random order."""
    parts, places = _parts(line)
    versions = []
    for left, right in itertools.pairwise(places):
        swapped = list(parts)
        swapped[left], swapped[right] = parts[right], parts[left]
        versions.append("".join(swapped))
    rng.shuffle(versions)
    return versions


def _ids(bpe: Tokenizer, text: str) -> list[int]:
    return bpe.encode(text, add_special_tokens=False).ids


def _task(name: str, chance: float, questions: list[Question], sequence_length: int, multiple: int) -> Task:
    """Pads the questions on the right to one length: causal models do not see what comes after."""
    longest = max(len(q.prompt) + len(choice) for q in questions for choice in q.choices) - 1
    granule = math.lcm(GRANULE, multiple)
    length = min(math.ceil(longest / granule) * granule, sequence_length)
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
    return Task(name, chance, sequence_length // length, tokens, labels, mask, correct)
