import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from layouts import write_ag_news, write_imdb_csv, write_imdb_folder
from refusals import refusal

from fl_lightning.data import IMDB, AGNews, LoadedData, text
from fl_lightning.data.text import PADDING, UNKNOWN, Vocabulary, split_words


def words_of(data: LoadedData, vocabulary: Vocabulary, split: str) -> list[list[str]]:
    """Return the known words of a split's texts, from their ids."""
    names = {number: word for word, number in vocabulary.ids.items()}
    return [[names[i] for i in row if i > UNKNOWN] for row in getattr(data, f"x_{split}").tolist()]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("It's GREAT", ["it's", "great"]),
        ("end.<br /><br />Begin", ["end", "begin"]),
        ("'quoted' 80's", ["quoted", "80's"]),
        ("a\tb\nc,d", ["a", "b", "c", "d"]),
        ("... --", []),
    ],
)
def test_words_are_lower_case_without_markup_and_punctuation(raw: str, expected: list[str]) -> None:
    assert split_words(raw) == expected


def test_frequent_words_get_small_ids_and_ties_go_by_the_alphabet() -> None:
    assert Vocabulary(["c a b", "b a", "b"], size=10).ids == {"b": 2, "a": 3, "c": 4}
    assert Vocabulary(["c a b", "b a", "b"], size=4).ids == {"b": 2, "a": 3}


def test_texts_are_truncated_and_padded_and_have_unknown_words() -> None:
    ids = Vocabulary(["a a b"], size=10).encode(["b a b a", "x a", ""], length=3)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[3, 2, 3], [UNKNOWN, 2, PADDING], [PADDING] * 3]


@pytest.mark.parametrize(
    ("write", "make", "classes"),
    [(write_ag_news, AGNews, 4), (write_imdb_folder, IMDB, 2), (write_imdb_csv, partial(IMDB, layout="csv"), 2)],
)
def test_texts_and_labels_are_read_as_written(write: Callable, make: Callable, classes: int, tmp_path: Path) -> None:
    """IMDB's folder also holds an unlabelled review, which is not read, and each half of its CSV file is a split."""
    train, test = write(tmp_path)
    data = make(str(tmp_path), length=30).load()
    assert words_of(data, Vocabulary(train.x, 10_000), "train") == [split_words(one) for one in train.x]
    assert (data.y_train.tolist(), data.y_test.tolist()) == (train.y, test.y)
    assert (data.num_classes, data.in_shape) == (classes, (30,))
    assert data.y_train.dtype == data.x_train.dtype == torch.int64


@pytest.mark.parametrize("dataset", [AGNews, IMDB])
def test_the_vocabulary_has_only_words_of_the_training_texts(dataset: type, tmp_path: Path) -> None:
    write_ag_news(tmp_path)
    write_imdb_folder(tmp_path, n=(2, 40))
    data = dataset(str(tmp_path), length=30).load()
    assert set(data.x_test.flatten().tolist()) - set(data.x_train.flatten().tolist()) <= {PADDING, UNKNOWN}
    assert UNKNOWN in data.x_test
    assert UNKNOWN not in data.x_train


def test_a_review_of_unknown_sentiment_is_refused(tmp_path: Path) -> None:
    write_imdb_csv(tmp_path)
    with (tmp_path / "IMDB Dataset.csv").open("a") as file:
        file.write("so so,mixed\n")
    message = refusal(IMDB(str(tmp_path), layout="csv"))
    assert f"{tmp_path}/IMDB Dataset.csv: not a readable csv file: row 26 (column 2 (the label) holds " in message


def test_files_are_downloaded_only_if_they_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fetch_csv(url: str, folder: Path, name: str, md5: str) -> None:
        calls.append((url.rsplit("/", 1)[1], md5))
        if not folder.exists():
            write_ag_news(folder.parent)

    def fetch_archive(url: str, root: str, md5: str) -> None:
        calls.append((url.rsplit("/", 1)[1], md5))
        write_imdb_folder(Path(root))

    monkeypatch.setattr(text, "download_url", fetch_csv)
    monkeypatch.setattr(text, "download_and_extract_archive", fetch_archive)
    for _ in range(2):
        AGNews(str(tmp_path), download=True).load()
        IMDB(str(tmp_path), download=True).load()
    assert calls == [("train.csv", AGNews.md5["train"]), ("aclImdb_v1.tar.gz", IMDB.md5)]


def test_the_csv_file_of_imdb_cannot_be_downloaded() -> None:
    assert refusal(lambda: IMDB(layout="csv", download=True)).startswith(
        "scenario.dataset.download: IMDB is downloaded"
    )


@pytest.mark.skipif("FL_LIGHTNING_DATA" not in os.environ, reason="FL_LIGHTNING_DATA names no folder with the data")
@pytest.mark.parametrize(("dataset", "counts"), [(AGNews, (6000, 1600)), (IMDB, (2000, 1000))])
def test_the_real_texts_load(dataset: type, counts: tuple[int, int]) -> None:
    data = dataset(os.environ["FL_LIGHTNING_DATA"]).load()
    assert (len(data.y_train), len(data.y_test)) == counts
    known = (data.x_test > UNKNOWN).sum() / (data.x_test != PADDING).sum()
    assert known > 0.85
    assert data.x_train.max() == 9_999
