"""Short documents made by rule, that teach skills which a small model can learn in a few hundred steps.

Each task is a prompt with one right answer. Questions and training documents never meet: whether a prompt
is a question is decided by its hash, so the two sets are disjoint whatever the seeds.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer

from nemo_qad.errors import ConfigError

# fmt: off
WORDS = (
    "red", "dog", "sun", "tree", "car", "box", "cup", "hat", "pen", "map", "key", "bed", "cat", "egg", "fish", "gold",
)
# fmt: on
NUMBERS = range(18)
SUMS = range(2 * max(NUMBERS) + 1)
QUESTION_SHARE = 8  # one prompt in this many is kept for questions
CLOSERS = {"(": ")", "[": "]", "{": "}"}
OPENERS = tuple(CLOSERS)
VOCABULARY = (*WORDS, *CLOSERS, *CLOSERS.values(), *map(str, SUMS))  # all that answers are made of


def check_words(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Checks that every word of the answers is one token, so that exact match judges words, not spelling.

    Raises:
        ConfigError: the vocabulary is too small for that.
    """
    broken = [word for word in VOCABULARY if len(tokenizer.encode(f" {word}").ids) > 1]
    if broken:
        raise ConfigError(
            "model.vocab_size",
            vocab_size,
            f"the tokenizer has no single token for {', '.join(broken[:5])}",
            "Give 1024 or more.",
        )


@dataclass(frozen=True)
class Example:
    """A prompt and its only right continuation, which starts with a space."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class GeneratedTask:
    """`chance`: the score of the best constant answer, to two digits."""

    name: str
    chance: float
    make: Callable[[random.Random], Example]


def _copy(rng: random.Random) -> Example:
    words = " ".join(rng.choices(WORDS, k=rng.randint(2, 4)))
    return Example(f"copy: {words} =>", f" {words}")


def _lookup(rng: random.Random) -> Example:
    keys = rng.sample(WORDS, 3)
    values = {key: rng.choice(NUMBERS) for key in keys}
    shown = " ".join(f"{key} {values[key]}" for key in keys)
    rng.shuffle(keys)
    solved = "".join(f" {key} {values[key]}" for key in keys[: rng.randint(0, 2)])
    asked = rng.choice(keys)
    return Example(f"lookup: {shown} =>{solved} {asked}", f" {values[asked]}")


def _brackets(rng: random.Random) -> Example:
    text: list[str] = []
    stack: list[str] = []
    for _ in range(rng.randint(4, 8)):
        if stack and rng.random() < 0.35:
            text.append(CLOSERS[stack.pop()])
        else:
            stack.append(rng.choice(OPENERS))
            text.append(stack[-1])
    if not stack:
        stack.append(rng.choice(OPENERS))
        text.append(stack[-1])
    return Example(f"close: {' '.join(text)} =>", "".join(f" {CLOSERS[b]}" for b in reversed(stack)))


def _pattern(rng: random.Random) -> Example:
    period = rng.randint(2, 4)
    words = rng.sample(WORDS, period)
    shown = rng.randint(2 * period, 3 * period)
    text = [words[i % period] for i in range(shown + period)]
    return Example(f"go on: {' '.join(text[:shown])} =>", "".join(f" {word}" for word in text[shown:]))


def _sort(rng: random.Random) -> Example:
    numbers = rng.sample(NUMBERS, 3)
    return Example(f"sort: {' '.join(map(str, numbers))} =>", "".join(f" {n}" for n in sorted(numbers)))


def _sum(rng: random.Random) -> Example:
    a, b, c, d = (rng.choice(NUMBERS) for _ in range(4))
    return Example(f"sum: {a} + {b} = {a + b} ; {c} + {d} =", f" {c + d}")


TASKS = (
    GeneratedTask("copy", 0.0, _copy),
    GeneratedTask("lookup", 0.08, _lookup),
    GeneratedTask("brackets", 0.05, _brackets),
    GeneratedTask("pattern", 0.0, _pattern),
    GeneratedTask("sort", 0.0, _sort),
    GeneratedTask("sum", 0.05, _sum),
)


def is_question(example: Example) -> bool:
    """Whether the prompt is kept for questions and never trained on. Depends on the prompt alone."""
    return zlib.crc32(example.prompt.encode()) % QUESTION_SHARE == 0


def training_documents(seed: int) -> Iterator[str]:
    """Endless documents, the tasks in turn, none of them a question."""
    rng = random.Random(f"train-{seed}")
    while True:
        for task in TASKS:
            example = task.make(rng)
            while is_question(example):
                example = task.make(rng)
            yield f"{example.prompt}{example.answer}\n"


def questions(task: GeneratedTask, num_questions: int, seed: int) -> list[Example]:
    """Distinct questions of a task, none of which any training document shows.

    Raises:
        ConfigError: the task has fewer different questions.
    """
    rng = random.Random(f"questions-{task.name}-{seed}")
    found: dict[str, Example] = {}
    draws = 0
    while len(found) < num_questions:
        example = task.make(rng)
        draws += 1
        if draws > 100 * QUESTION_SHARE * num_questions:
            raise ConfigError(
                "evaluation.num_questions",
                num_questions,
                f"task {task.name} has about {len(found)} different questions",
                f"Give at most {len(found)}.",
            )
        if is_question(example):
            found[example.prompt] = example
    return list(found.values())
