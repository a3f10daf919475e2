"""Generated questions: each answer by an independent rule, and no question is ever trained on."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from nemo_qad.data import generated, tokenizer
from nemo_qad.errors import ConfigError

TASKS = {task.name: task for task in generated.TASKS}


def expected_answer(name: str, prompt: str) -> str:
    """The answer, found by other means than the generator's."""
    words = prompt.split()
    if name == "copy":
        return " ".join(words[1:-1])
    if name == "sort":
        return " ".join(map(str, sorted(map(int, words[1:-1]))))
    if name == "sum":
        return str(eval(prompt.split(";")[1].removesuffix("=")))
    if name == "pattern":
        shown = words[2:-1]
        (period, *_) = (p for p in range(1, len(shown)) if shown[p:] == shown[:-p])
        return " ".join(shown[-period:])
    if name == "brackets":
        text = "".join(words[1:-1])
        while (shorter := text.replace("()", "").replace("[]", "").replace("{}", "")) != text:
            text = shorter
        return " ".join(text[::-1].translate(str.maketrans("([{", ")]}")))
    raise AssertionError(f"no rule for task {name}: add one")


@pytest.mark.parametrize("name", TASKS)
def test_answers_follow_the_rule(name: str) -> None:
    for question in generated.questions(TASKS[name], 200, seed=3):
        assert question.answer.startswith(" ")
        assert question.answer.strip() == expected_answer(name, question.prompt), question


@pytest.mark.parametrize("name", TASKS)
def test_questions_are_distinct_and_never_trained_on(name: str) -> None:
    questions = generated.questions(TASKS[name], 400, seed=3)
    prompts = {question.prompt for question in questions}
    assert len(prompts) == 400
    # The same seed on purpose: what keeps the two apart must not be the seed.
    documents = itertools.islice(generated.training_documents(3), 20_000)
    assert not [document for document in documents if any(document.startswith(p) for p in prompts)]


def test_every_task_is_taught_in_equal_number() -> None:
    documents = list(itertools.islice(generated.training_documents(1), 10 * len(TASKS)))
    starts = [document.split(":")[0] for document in documents]
    assert {starts.count(start) for start in set(starts)} == {10}
    assert len(set(starts)) == len(TASKS)


def test_same_seed_same_documents() -> None:
    first, again, other = (list(itertools.islice(generated.training_documents(s), 50)) for s in (1, 1, 2))
    assert first == again != other
    task = generated.TASKS[0]
    assert generated.questions(task, 20, 1) == generated.questions(task, 20, 1) != generated.questions(task, 20, 2)


def test_chance_is_what_the_best_constant_answer_scores() -> None:
    for task in generated.TASKS:
        answers = Counter(question.answer for question in generated.questions(task, 400, seed=1))
        assert task.chance == pytest.approx(answers.most_common(1)[0][1] / 400, abs=0.03), task.name


def test_more_questions_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.num_questions=5000: task sort has about \d+ different"):
        generated.questions(TASKS["sort"], 5000, seed=1)


def test_words_are_single_tokens_or_the_vocabulary_is_refused() -> None:
    bpe = tokenizer.train([" " + " ".join(generated.VOCABULARY)], 1024)
    generated.check_words(bpe, 1024)
    for task in generated.TASKS:
        for question in generated.questions(task, 200, 1):
            assert len(bpe.encode(question.answer).ids) == len(question.answer.split())
    with pytest.raises(ConfigError, match=r"model\.vocab_size=600.*no single token for"):
        generated.check_words(tokenizer.train(["no such words here"], 600), 600)
