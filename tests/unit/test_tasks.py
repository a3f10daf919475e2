"""Tasks: what the questions are, and that scores equal greedy decoding and float64 likelihoods."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import VOCAB_SIZE
from torch import Tensor

from nemo_qad.data import generated, indexed, tokenizer
from nemo_qad.data.prepare import PreparedData
from nemo_qad.errors import ConfigError, UserError
from nemo_qad.evaluation.tasks import Task, build_tasks, score

NUM_QUESTIONS = 48


@pytest.fixture(scope="module")
def tasks(small_prepared: PreparedData) -> dict[str, Task]:
    built = build_tasks(small_prepared, num_questions=NUM_QUESTIONS, sequence_length=128, seed=1)
    return {task.name: task for task in built}


class HistoryModel:
    """Logits that depend on the current token and, weakly, on all before it; right padding changes nothing."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=rng)

    def __call__(self, tokens: Tensor) -> Tensor:
        seen = self.table[tokens]
        return seen + 0.3 * seen.cumsum(dim=1) / torch.arange(1, tokens.shape[1] + 1)[:, None]


def rows_of(task: Task, n: int, c: int) -> tuple[list[int], list[int]]:
    """The prompt and the choice of one row, from its mask."""
    places = task.mask[n, c].nonzero()[:, 0].tolist()
    assert places == list(range(places[0], places[-1] + 1))
    return task.tokens[n, c, : places[0] + 1].tolist(), task.labels[n, c, places].tolist()


def test_there_are_natural_and_generated_tasks(tasks: dict[str, Task]) -> None:
    assert list(tasks)[:2] == ["real_line", "intact_line"]
    assert len(tasks) >= 5
    for task in tasks.values():
        assert task.tokens.shape[0] == NUM_QUESTIONS and task.tokens.shape[2] <= 128
        assert task.tokens.shape == task.labels.shape == task.mask.shape
        assert 0 <= task.chance < 0.5


def test_labels_are_the_next_tokens_and_questions_start_a_document(tasks: dict[str, Task]) -> None:
    for task in tasks.values():
        assert bool((task.tokens[:, :, 0] == 0).all())
        for n in range(NUM_QUESTIONS):
            for c in range(task.tokens.shape[1]):
                prompt, choice = rows_of(task, n, c)
                assert task.tokens[n, c, : len(prompt) + len(choice) - 1].tolist() == prompt + choice[:-1]


def test_right_lines_are_in_the_held_out_text(tasks: dict[str, Task], small_prepared: PreparedData) -> None:
    bpe = tokenizer.load(small_prepared.tokenizer_folder)
    text = "\0".join(bpe.decode(d.tolist()) for d in indexed.check(small_prepared.held_out_prefix).documents())
    for name in ("real_line", "intact_line"):
        task = tasks[name]
        for n in range(NUM_QUESTIONS):
            prompts, versions = zip(*(rows_of(task, n, c) for c in range(4)), strict=True)
            assert len({tuple(p) for p in prompts}) == 1 and len({tuple(v) for v in versions}) == 4
            assert len({len(v) for v in versions}) == 1  # else counting tokens would win
            together = [bpe.decode(prompts[0] + version) for version in versions]
            assert [t in text for t in together] == [c == task.correct[n] for c in range(4)]
        assert len(set(task.correct.tolist())) == 4  # the right one is not always in one place


def test_wrong_versions_have_the_words_of_the_line(tasks: dict[str, Task], small_prepared: PreparedData) -> None:
    bpe = tokenizer.load(small_prepared.tokenizer_folder)
    for n in range(NUM_QUESTIONS):
        words = {tuple(sorted(bpe.decode(rows_of(tasks["intact_line"], n, c)[1]).split())) for c in range(4)}
        assert len(words) == 1


def test_one_word_is_replaced(tasks: dict[str, Task], small_prepared: PreparedData) -> None:
    bpe = tokenizer.load(small_prepared.tokenizer_folder)
    for n in range(NUM_QUESTIONS):
        lines = [bpe.decode(rows_of(tasks["real_line"], n, c)[1]).split() for c in range(4)]
        right = lines.pop(int(tasks["real_line"].correct[n]))
        places = [[i for i, word in enumerate(line) if word != right[i]] for line in lines]
        assert all(len(line) == len(right) for line in lines)
        assert [len(found) for found in places] == [1, 1, 1] and len({found[0] for found in places}) == 3


def test_answers_are_judged_whole(tasks: dict[str, Task], small_prepared: PreparedData) -> None:
    bpe = tokenizer.load(small_prepared.tokenizer_folder)
    for spec in generated.TASKS:
        for n, example in enumerate(generated.questions(spec, NUM_QUESTIONS, seed=1)):
            prompt, answer = rows_of(tasks[spec.name], n, 0)
            assert (bpe.decode(prompt), bpe.decode(answer)) == (example.prompt, example.answer)
            assert len(answer) == len(example.answer.split())


def greedy(model: HistoryModel, prompt: list[int], length: int) -> list[int]:
    text = list(prompt)
    for _ in range(length):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


def test_exact_match_equals_greedy_decoding(tasks: dict[str, Task]) -> None:
    """Half the answers are replaced by what the model itself would write, so both verdicts occur."""
    model, task = HistoryModel(1), tasks["copy"]
    tokens, labels = task.tokens.clone(), task.labels.clone()
    expected = []
    for n in range(NUM_QUESTIONS):
        prompt, answer = rows_of(task, n, 0)
        written = greedy(model, prompt, len(answer))
        if n % 2:
            places = range(len(prompt) - 1, len(prompt) - 1 + len(answer))
            labels[n, 0, places] = torch.tensor(written)
            tokens[n, 0, places[1:]] = torch.tensor(written[:-1])
        expected.append(bool(n % 2) or written == answer)
    found = score(dataclasses.replace(task, tokens=tokens, labels=labels), model, 7)
    assert found.dtype == torch.bool and found.tolist() == expected and 0 < sum(expected) < NUM_QUESTIONS


def test_one_wrong_token_makes_the_answer_wrong(tasks: dict[str, Task]) -> None:
    task = tasks["copy"]
    answers = dict(zip(map(tuple, task.tokens[:, 0].tolist()), task.labels[:, 0], strict=True))
    spoilt: set[tuple[int, int]] = set()

    def knowing(tokens: Tensor) -> Tensor:
        labels = torch.stack([answers[tuple(row)] for row in tokens.tolist()])
        return torch.nn.functional.one_hot(labels, VOCAB_SIZE).float()

    def slipping(tokens: Tensor) -> Tensor:
        logits = knowing(tokens)
        for b, row in enumerate(tokens.tolist()):
            n = list(answers).index(tuple(row))
            last = int(task.mask[n, 0].nonzero()[-1])
            if n % 3 == 0:
                logits[b, last] = logits[b, last].roll(1)
                spoilt.add((n, last))
            elif last + 1 < len(row):
                logits[b, last + 1 :] = torch.nan  # beyond the answer: must not matter
        return logits

    assert bool(score(task, knowing, 16).all())
    assert score(task, slipping, 16).tolist() == [bool(n % 3) for n in range(NUM_QUESTIONS)]


@pytest.mark.parametrize("name", ["real_line", "intact_line"])
def test_choices_equal_float64_likelihoods(tasks: dict[str, Task], name: str) -> None:
    model, task = HistoryModel(2), tasks[name]
    expected = []
    for n in range(NUM_QUESTIONS):
        likelihoods = []
        for c in range(4):
            prompt, choice = rows_of(task, n, c)
            log_p = model(torch.tensor([prompt + choice[:-1]]))[0].double().log_softmax(-1)
            terms = [float(log_p[len(prompt) - 1 + i, token]) for i, token in enumerate(choice)]
            likelihoods.append(sum(terms))
        expected.append(max(range(4), key=likelihoods.__getitem__) == task.correct[n])
    for micro_batch_size in (1, 16, 1000):
        assert score(task, model, micro_batch_size).tolist() == expected


def test_model_that_knows_nothing_scores_nothing(tasks: dict[str, Task]) -> None:
    """Ties and numbers that are not must not pass as right answers."""
    for value in (0.0, torch.nan):
        for task in tasks.values():
            found = score(task, lambda tokens, value=value: torch.full((*tokens.shape, VOCAB_SIZE), value), 16)
            assert not bool(found.any()), (task.name, value)


def test_guessing_one_place_scores_chance(small_prepared: PreparedData) -> None:
    tasks = build_tasks(small_prepared, num_questions=300, sequence_length=128, seed=1)
    for task in tasks[:2]:
        shares = torch.bincount(task.correct, minlength=4) / 300
        assert task.chance == 0.25 and bool(((shares - 0.25).abs() < 0.1).all())


def test_same_arguments_same_questions(small_prepared: PreparedData, tasks: dict[str, Task]) -> None:
    again, other = (
        build_tasks(small_prepared, num_questions=NUM_QUESTIONS, sequence_length=128, seed=seed) for seed in (1, 2)
    )
    for first, same, different in zip(tasks.values(), again, other, strict=True):
        assert torch.equal(first.tokens, same.tokens) and torch.equal(first.correct, same.correct)
        assert not torch.equal(first.labels, different.labels)


def test_questions_that_do_not_fit_are_refused(small_prepared: PreparedData) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.sequence_length=16: task real_line"):
        build_tasks(small_prepared, num_questions=10, sequence_length=16, seed=1)


def test_too_little_text_is_refused(small_prepared: PreparedData) -> None:
    with pytest.raises(UserError, match=r"Task real_line: .* gives \d+ questions, 100000 are asked for"):
        build_tasks(small_prepared, num_questions=100_000, sequence_length=128, seed=1)
    with pytest.raises(ConfigError, match=r"evaluation\.num_questions"):
        build_tasks(small_prepared, num_questions=0, sequence_length=128, seed=1)
