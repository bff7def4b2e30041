"""Text files for causal language models: samples, labels, clients, vocabulary, and wrong files."""

import itertools
from pathlib import Path

import pytest
import torch
from refusals import refusal
from torch import Tensor

from fl_lightning.core.objectives import CausalLM
from fl_lightning.data import ByClient, Dirichlet, LoadedData, Scenario, TextFile
from fl_lightning.data.token_texts import cut_tokens

LINES = ["a b c", "a b", "", "c c c c c c c", "b", "a"]


def write_lines(path: Path, lines: list[str]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    return str(path)


def rows_of(data: LoadedData, split: str = "train") -> list[tuple[list[int], list[int]]]:
    """Return the token ids without padding, and the labels, of each sample."""
    x, y = getattr(data, f"x_{split}"), getattr(data, f"y_{split}")
    ids, mask = (x.tensors[name] for name in ("input_ids", "attention_mask"))
    return [(row[kept != 0].tolist(), labels.tolist()) for row, kept, labels in zip(ids, mask, y, strict=True)]


def test_each_line_is_a_text_and_each_token_is_predicted_once(tmp_path: Path) -> None:
    path, test = write_lines(tmp_path / "a.txt", LINES), write_lines(tmp_path / "b.txt", ["a d"])
    data = TextFile(path, length=5, test_path=test).checked()
    c, a, b = 3, 4, 5  # by frequency, then in alphabetical order
    whole = [[2, a, b, c, 2], [2, a, b, 2], [2, c, c, c, c, c, c, c, 2], [2, b, 2], [2, a, 2]]
    pieces = [whole[0], whole[1], whole[2][:5], whole[2][4:], whole[3], whole[4]]
    assert [ids for ids, _ in rows_of(data)] == pieces
    assert all(labels == ids + [-100] * (5 - len(ids)) for ids, labels in rows_of(data))
    predicted = int(CausalLM().units(data.y_train))
    assert predicted == sum(len(text) - 1 for text in whole)
    assert rows_of(data, "test") == [([2, a, 1, 2], [2, a, 1, 2, -100])]
    assert data.num_classes == 6


@pytest.mark.parametrize("length", [2, 3, 5, 9, 20])
def test_pieces_have_each_pair_of_neighbours_once(length: int) -> None:
    tokens = list(range(9))
    pieces = list(cut_tokens(tokens, length))
    pairs = [pair for piece in pieces for pair in itertools.pairwise(piece)]
    assert pairs == list(itertools.pairwise(tokens))
    assert max(map(len, pieces)) <= length
    assert list(cut_tokens([7], length)) == []


def test_files_of_a_folder_are_the_clients(tmp_path: Path) -> None:
    for client, word in (("north", "n"), ("south", "s")):
        write_lines(tmp_path / "texts" / f"{client}.txt", [f"{word} w"] * 10)
    data = Scenario(TextFile(str(tmp_path / "texts"), length=6), ByClient()).build(0)
    assert data.names.clients == ["north", "south"]
    assert data.objective == CausalLM()
    ids = data.data.x_train.tensors["input_ids"]
    words = [set(ids[data.shard(client).train][:, 1].tolist()) for client in (0, 1)]
    assert sorted(map(len, words)) == [1, 1]
    assert words[0] != words[1]


def test_the_vocabulary_has_at_most_the_given_size(tmp_path: Path) -> None:
    data = TextFile(write_lines(tmp_path / "a.txt", LINES * 3), length=9, vocab_size=4).checked()
    assert data.num_classes == 4
    assert set(data.x_train.tensors["input_ids"].unique().tolist()) == {0, 1, 2, 3}
    larger = TextFile(str(tmp_path / "a.txt"), length=9, vocab_size=50).checked()
    assert larger.num_classes == 50  # of the user's own network


def test_paragraphs_are_texts_with_another_separator(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.txt", ["a", "b", "", "c", "", "d", "", "e", "", "f"])
    data = TextFile(path, separator="\n\n", length=6, tokenizer="bytes").checked()
    assert len(data.y_train) + len(data.y_test) == 5


@pytest.mark.parametrize("end", ["\r\n", "\r"])
@pytest.mark.parametrize("separator", ["\n\n", "own"])
def test_line_ends_and_byte_order_marks_of_other_systems_do_not_matter(
    end: str, separator: str, tmp_path: Path
) -> None:
    lines = ["a b", "b", "", "c", "", "d", "", "e", "", "f"]
    expected = TextFile(write_lines(tmp_path / "a.txt", lines), "bytes", 6, separator="\n\n").checked()
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf" + end.join(lines).encode())
    own = 2 * end if separator == "own" else separator
    data = TextFile(str(tmp_path / "b.txt"), "bytes", 6, separator=own).checked()
    assert rows_of(data) == rows_of(expected)
    assert rows_of(data, "test") == rows_of(expected, "test")


def test_a_client_without_text_is_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "texts" / "a.txt", LINES)
    blank = write_lines(tmp_path / "texts" / "b.txt", [" ", ""])
    assert refusal(TextFile(str(tmp_path / "texts"))).startswith(f"scenario.dataset.path: {blank}: ")


def test_two_files_of_one_client_are_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "texts" / "a.md", LINES)
    second = write_lines(tmp_path / "texts" / "a.txt", LINES)
    assert refusal(TextFile(str(tmp_path / "texts"))).startswith(f"scenario.dataset.path: {second}: ")


def test_a_single_text_cannot_be_split(tmp_path: Path) -> None:
    assert "add samples" in refusal(TextFile(write_lines(tmp_path / "a.txt", ["a b"])))


def test_a_partition_by_class_is_refused_and_the_tokens_are_one_group(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.txt", ["a b"] * 20)
    message = refusal(lambda: Scenario(TextFile(path), Dirichlet(), 2).build(0))
    assert message.startswith("scenario.partition")
    labels: Tensor = TextFile(path).checked().y_train
    assert torch.equal(CausalLM().strata(labels), torch.zeros(len(labels), dtype=torch.int64))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"path": "none.txt"}, "scenario.dataset.path"),
        ({"path": "empty.txt"}, "scenario.dataset.path"),
        ({"path": "blank.txt"}, "scenario.dataset.path"),
        ({"path": "binary.txt"}, "scenario.dataset.path"),
        ({"test_path": "none.txt"}, "scenario.dataset.test_path"),
        ({"test_path": "folder"}, "scenario.dataset.test_path"),
        ({"length": 1}, "scenario.dataset.length"),
        ({"vocab_size": 3}, "scenario.dataset.vocab_size"),
        ({"tokenizer": "bytes", "vocab_size": 100}, "scenario.dataset.vocab_size"),
        ({"tokenizer": "none"}, "scenario.dataset.tokenizer"),
        ({"separator": ""}, "scenario.dataset.separator"),
        ({"test_share": 2.0}, "scenario.dataset.test_share"),
    ],
)
def test_wrong_files_and_options_are_refused_by_their_key(options: dict, key: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.txt", LINES)
    write_lines(tmp_path / "folder" / "b.txt", LINES)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    paths = {name: str(tmp_path / options[name]) for name in ("path", "test_path") if name in options}
    given = {"path": str(tmp_path / "a.txt")} | options | paths
    assert refusal(lambda: TextFile(**given)).startswith(key)
