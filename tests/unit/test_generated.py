"""Generated questions: each answer by an independent rule, and no question is ever trained on."""

from __future__ import annotations

import itertools

import pytest

from nemo_qad.data import generated, tokenizer
from nemo_qad.errors import ConfigError

TASKS = {task.name: task for task in generated.TASKS}


def expected_answer(name: str, prompt: str) -> str:
    """The answer, found by other means than the generator's."""
    words = prompt.split()
    if name == "copy":
        return " ".join(words[1:-1])
    if name == "lookup":
        pairs = dict(pair.split(" = ") for pair in prompt.split(": ")[1].split(" => ")[0].split(" ; "))
        return pairs[words[-2]]
    if name == "sort":
        return " ".join(sorted(words[1:-1]))
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


def test_chance_is_the_score_of_a_guess_among_answers_of_the_right_form() -> None:
    """Look-up: the guess is any of the values shown. The others: a guess is hardly ever right."""
    questions = generated.questions(TASKS["lookup"], 2000, seed=1)
    hits = [
        sum(pair.split(" = ")[1] == q.answer.strip() for pair in shown) / len(shown)
        for q in questions
        if (shown := q.prompt.split(": ")[1].split(" => ")[0].split(" ; "))
    ]
    assert TASKS["lookup"].chance == pytest.approx(sum(hits) / len(hits), abs=0.03)


def test_words_are_single_tokens_or_the_vocabulary_is_refused() -> None:
    documents = list(itertools.islice(generated.training_documents(1), 2000))
    bpe = tokenizer.train(documents, 1024)
    generated.check_words(bpe, 1024)
    for question in generated.questions(generated.TASKS[0], 20, 1):
        assert len(bpe.encode(question.answer).ids) == len(question.answer.split())
    with pytest.raises(ConfigError, match=r"model\.vocab_size=600.*no single token for"):
        generated.check_words(tokenizer.train(["no such words here"], 600), 600)
