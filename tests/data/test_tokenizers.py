"""Tokenizers by words and bytes, and texts as inputs of a classifier."""

from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import write_csv
from refusals import refusal

from fl_lightning.core.inputs import Inputs
from fl_lightning.data import TextTable
from fl_lightning.data.tokenizers import END, ByteTokenizer, WordTokenizer, load_tokenizer

COLUMNS = {
    "text": ["Good film, good!", "Bad film.", "a good one", "a bad bad one, really", "", "Bad"] * 4,
    "label": ["yes", "no", "yes", "no", "yes", "no"] * 4,
    "author": [i % 4 for i in range(24)],
}


def table(tmp_path: Path, **options: object) -> TextTable:
    write_csv(tmp_path / "t.csv", COLUMNS | {"text": [text or "Ok" for text in COLUMNS["text"]]})
    return TextTable(str(tmp_path / "t.csv"), **options)


def test_words_get_ids_by_frequency_and_other_words_get_one() -> None:
    tokenizer = WordTokenizer()
    split = [tokenizer.split(text) for text in ("b a, b", "B a b")]
    assert split == [["b", "a", ",", "b"], ["B", "a", "b"]]
    tokenizer.fit(split, 6)
    assert tokenizer.size == 6
    assert [tokenizer.ids(one) for one in split] == [[3, 4, 5, 3], [1, 4, 3]]
    assert tokenizer.ids([END, "a", "unseen", END]) == [2, 4, 1, 2]


def test_bytes_need_no_vocabulary() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.split("né\n")
    assert bytes(number - 3 for number in ids).decode() == "né\n"  # type: ignore[operator]
    assert max(ByteTokenizer().split("".join(map(chr, range(0x250))))) < tokenizer.size == 259  # type: ignore[type-var]
    assert tokenizer.split("\ud800") == [ord("?") + 3]


@pytest.mark.parametrize("name", ["words", "bytes"])
def test_a_table_of_texts_gives_ids_and_a_mask(name: str, tmp_path: Path) -> None:
    data = table(tmp_path, tokenizer=name, length=12).checked()
    assert isinstance(data.x_train, Inputs)
    ids, mask = data.x_train.tensors["input_ids"], data.x_train.tensors["attention_mask"]
    lengths = mask.sum(dim=1)
    assert torch.equal(mask, (torch.arange(12) < lengths[:, None]).long())
    assert bool((ids[:, 0] == END).all())
    assert bool((ids[torch.arange(len(ids)), lengths - 1] == END).all())  # also of a truncated text
    assert not ids[mask == 0].any()
    assert lengths.max() == (12 if name == "bytes" else 8)


def test_the_vocabulary_is_that_of_the_training_texts(tmp_path: Path) -> None:
    rows = ["a b"] * 6 + ["c c c d"] * 2
    write_csv(tmp_path / "t.csv", {"text": rows, "label": [0, 1] * 4, "split": ["train"] * 6 + ["test"] * 2})
    data = TextTable(str(tmp_path / "t.csv"), tokenizer="words", length=6, split="split").checked()
    assert data.x_train.tensors["input_ids"].tolist() == [[2, 3, 4, 2, 0, 0]] * 6
    assert data.x_test.tensors["input_ids"].tolist() == [[2, 1, 1, 1, 1, 2]] * 2


def test_statistics_leave_out_held_out_rows(tmp_path: Path) -> None:
    dataset = table(tmp_path, tokenizer="words", length=8)
    dataset.fitted = np.array([0])
    ids = dataset.checked().x_train.tensors["input_ids"]
    assert len(ids.unique()) <= 9
    assert 1 in ids


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"tokenizer": "no/folder"}, "scenario.dataset.tokenizer"),
        ({"tokenizer": "Words"}, "scenario.dataset.tokenizer"),
        ({"tokenizer": "words", "length": 2}, "scenario.dataset.length"),
        ({"tokenizer": "words", "vocab_size": 3}, "scenario.dataset.vocab_size"),
    ],
)
def test_wrong_options_are_refused_by_their_key(options: dict, key: str, tmp_path: Path) -> None:
    assert refusal(table(tmp_path, **options)).startswith(key)


def test_a_vocabulary_that_is_too_small_for_its_tokenizer_is_refused() -> None:
    assert refusal(lambda: load_tokenizer("bytes").fit([], 258)).startswith("scenario.dataset.vocab_size")
    load_tokenizer("bytes").fit([], 300)
