"""Two tokenizers that mean different words by one id are told apart (case C1)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from nemo_qad.data.tokenizer import require_same_vocabulary
from nemo_qad.errors import UserError

TEACHER = Path("teacher")


def of_words(*words: str) -> Tokenizer:
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))


def test_equal_vocabularies_pass() -> None:
    require_same_vocabulary(of_words("a", "b", "c"), of_words("a", "b", "c"), TEACHER)


def test_the_first_different_ids_are_named() -> None:
    with pytest.raises(UserError) as caught:
        require_same_vocabulary(of_words("a", "b", "c", "d"), of_words("a", "c", "b", "d"), TEACHER)
    message = str(caught.value)
    assert "differ in 2 of 4 ids" in message
    assert "id 1: 'b' in the data, 'c' of the teacher; id 2: 'c' in the data, 'b' of the teacher" in message
    assert str(TEACHER / "tokenizer.json") in message


def test_a_longer_vocabulary_is_another_one() -> None:
    with pytest.raises(UserError, match=r"differ in 1 of 3 ids \(id 2: None in the data, 'c' of the teacher\)"):
        require_same_vocabulary(of_words("a", "b"), of_words("a", "b", "c"), TEACHER)


def test_added_tokens_count() -> None:
    with_special = of_words("a", "b")
    with_special.add_special_tokens(["<eod>"])
    with pytest.raises(UserError, match="'<eod>' of the teacher"):
        require_same_vocabulary(of_words("a", "b"), with_special, TEACHER)
