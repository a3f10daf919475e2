"""A byte-level BPE tokenizer, trained on the spot and stored as Hugging Face tokenizer files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nemo_qad.errors import ConfigError, UserError

END_OF_DOCUMENT = "<eod>"  # id 0: ends every document, and starts every question
PADDING = "<pad>"  # id 1: never in the data; fills questions up to one length
NUM_SPECIAL = 2
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
MIN_VOCAB_SIZE = 512  # 256 bytes, 2 specials, and merges that make the generated words single tokens


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains byte-level BPE. The result has at most `vocab_size` ids, fewer where the text runs out of pairs.

    Raises:
        ConfigError: `vocab_size` is below `MIN_VOCAB_SIZE`.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            "model.vocab_size", vocab_size, "too small for a tokenizer", f"Give at least {MIN_VOCAB_SIZE}."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and the two small files that make `AutoTokenizer` read it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    specials = {"eos_token": END_OF_DOCUMENT, "pad_token": PADDING}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **specials,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(specials, indent=2) + "\n")


def load(folder: Path) -> Tokenizer:
    """Reads tokenizer.json.

    Raises:
        UserError: the file is missing or is not a tokenizer.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{path} is missing: put the tokenizer.json of the tokenizer that made the data there.")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise UserError(f"{path} is not a tokenizer of the tokenizers library ({error}): copy it again.") from None


def copy_files(source: Path, target: Path) -> None:
    """The files of a tokenizer, as far as `source` has them; tokenizer.json it must have.

    Raises:
        UserError: it has not.
    """
    if not (source / "tokenizer.json").is_file():
        raise UserError(f"{source} holds no tokenizer.json: give the folder of the model's tokenizer")
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def end_of_document(tokenizer: Tokenizer, folder: Path) -> int | None:
    """The id that separates documents: ours, else the eos_token of tokenizer_config.json, else none."""
    token: object = END_OF_DOCUMENT
    config = folder / "tokenizer_config.json"
    if config.is_file():
        try:
            token = json.loads(config.read_text()).get("eos_token") or token
        except ValueError as error:
            raise UserError(f"{config} is not JSON ({error}): copy it again.") from None
    if isinstance(token, dict):
        token = token.get("content")
    return tokenizer.token_to_id(token) if isinstance(token, str) else None


def encode(tokenizer: Tokenizer, texts: list[str], end: int) -> list[np.ndarray]:
    """Token ids of each text with the id `end` appended, int64 [length]."""
    # Without special tokens in the text: a file that spells "<eod>" must not end a document.
    tokenizer.encode_special_tokens = True
    return [np.array([*encoding.ids, end], dtype=np.int64) for encoding in tokenizer.encode_batch_fast(texts)]


def require_same_vocabulary(data: Tokenizer, teacher: Tokenizer, teacher_path: Path) -> None:
    """A student may only learn from a teacher that means the same word by each id.

    Raises:
        UserError: with the first ids whose words differ.
    """
    ours, theirs = (
        {i: word for word, i in tokenizer.get_vocab(with_added_tokens=True).items()} for tokenizer in (data, teacher)
    )
    ids = sorted(ours.keys() | theirs.keys())
    different = [i for i in ids if ours.get(i) != theirs.get(i)]
    if not different:
        return
    shown = "; ".join(
        f"id {i}: {ours.get(i)!r} in the data, {theirs.get(i)!r} of the teacher" for i in different[:3]
    )
    raise UserError(
        f"{teacher_path / 'tokenizer.json'} and the data's tokenizer differ in {len(different)} of {len(ids)} ids "
        f"({shown}). Ids would mean other words to the teacher: prepare the data with the teacher's tokenizer"
    )
