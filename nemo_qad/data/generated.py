"""Short documents made by rule, that teach skills which a small model can learn in a few hundred steps.

Each task is a prompt with one right answer. Questions and training documents never meet: whether a prompt
is a question is decided by its hash, so the two sets are disjoint whatever the seeds.

copy      "copy: red dog sun =>" " red dog sun"
brackets  "close: ( [ ] { =>" " } )"
pattern   "go on: red dog red dog red =>" " dog red"
sort      "sort: 7 12 3 =>" " 3 7 12"
sum       "sum: 3 + 4 = 7 ; 2 + 9 =" " 11"

The default teacher (1,000 steps of 8 x 128 tokens, a quarter of them generated) gets between half and nearly
all of each right, so a loss of accuracy shows. Looking up a key's value among several pairs is left out: that
teacher does no better there than to guess among the values shown.
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
MAX_MISSES = 5000  # examples in a row that are no new question: there are hardly any left
SUMS = range(2 * max(NUMBERS) + 1)
QUESTION_SHARE = 8  # one prompt in this many is kept for questions
CLOSERS = {"(": ")", "[": "]", "{": "}"}
OPENERS = tuple(CLOSERS)
# What answers are made of, and the sign before them: a prompt's end must be as near to its words as can be.
VOCABULARY = (*WORDS, *CLOSERS, *CLOSERS.values(), *map(str, SUMS), "=>")


def check_words(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Checks that every word of an answer is one token, so that exact match judges words, not spelling.

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
    misses = 0
    while len(found) < num_questions:
        example = task.make(rng)
        new = is_question(example) and example.prompt not in found
        misses = 0 if new else misses + 1
        if new:
            found[example.prompt] = example
        if misses > MAX_MISSES:
            raise ConfigError(
                "evaluation.num_questions",
                num_questions,
                f"task {task.name} has about {len(found)} different questions",
                f"Give at most {len(found)}.",
            )
    return list(found.values())
