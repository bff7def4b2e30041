"""LEAF's datasets, compared to plain loops over the written files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import LINES, LeafUser, write_femnist, write_leaf, write_sent140, write_shakespeare
from refusals import check_refused

from fl_lightning.data import FEMNIST, ByClient, Scenario, Sent140, Shakespeare
from fl_lightning.data.leaf import LETTERS
from fl_lightning.data.text import PADDING, UNKNOWN, split_words

ROLE = "TWELFTH_NIGHT_MALVOLIO"
PLAYS, TWEETS = (write_shakespeare, Shakespeare, "shakespeare"), (write_sent140, Sent140, "sent140")


def written(split: dict[str, LeafUser]) -> list[tuple[str, Any, Any]]:
    """User, input and label of each sample, in the order of the files."""
    return [(user, x, y) for user, (xs, ys) in split.items() for x, y in zip(xs, ys, strict=True)]


def test_femnist_is_read_as_it_was_written(tmp_path: Path) -> None:
    train, test = map(written, write_femnist(tmp_path))
    data = FEMNIST(str(tmp_path)).checked()
    assert data.num_classes == 62
    assert data.in_shape == (1, 28, 28)
    for x, y, owners, expected in (
        (data.x_train, data.y_train, data.client_train, train),
        (data.x_test, data.y_test, data.client_test, test),
    ):
        assert owners is not None
        assert owners.tolist() == [user for user, _, _ in expected]
        assert torch.equal(x, torch.tensor([pixels for _, pixels, _ in expected]).reshape(-1, 1, 28, 28))
        assert y.tolist() == [label for _, _, label in expected]
    assert data.x_train.dtype == torch.float32


def test_characters_of_shakespeare_are_numbered_in_the_order_of_leaf(tmp_path: Path) -> None:
    train, test = map(written, write_shakespeare(tmp_path))
    data = Shakespeare(str(tmp_path)).checked()
    assert data.num_classes == len(LETTERS) == 80
    assert "".join(LETTERS[k] for k in (0, 1, 10, 11, 25, -1)) == "\n .0A}"
    for x, y, expected in ((data.x_train, data.y_train, train), (data.x_test, data.y_test, test)):
        assert x.tolist() == [[LETTERS.index(letter) + 2 for letter in text] for _, text, _ in expected]
        assert [LETTERS[label] for label in y] == [letter for _, _, letter in expected]
    assert data.client_train is not None
    assert set(data.client_train.tolist()) == set(LINES)
    assert (
        "".join(LETTERS[k] for k in data.y_train[data.client_train == "TWELFTH_NIGHT_CURIO"]) == "Will you go hunt, my "
    )


def test_a_character_unknown_to_leaf_gets_the_unknown_token(tmp_path: Path) -> None:
    text = "é\x7f{|~\U0001f600\ud800z" + " " * 72
    write_leaf(tmp_path, "shakespeare", {"a": ([text, text], ["z", "}"])}, 0.5)
    data = Shakespeare(str(tmp_path)).checked()
    assert data.x_train[0, :9].tolist() == [UNKNOWN] * 7 + [LETTERS.index("z") + 2, LETTERS.index(" ") + 2]


def test_sent140_encodes_the_last_column(tmp_path: Path) -> None:
    train, test = map(written, write_sent140(tmp_path))
    data = Sent140(str(tmp_path), length=6, vocab_size=9).checked()
    assert data.num_classes == 2
    counted: dict[str, int] = {}
    for _, row, _ in train:
        for word in split_words(row[4]):
            counted[word] = counted.get(word, 0) + 1
    ranked = sorted(counted, key=lambda word: (-counted[word], word))[:7]
    for x, y, owners, expected in (
        (data.x_train, data.y_train, data.client_train, train),
        (data.x_test, data.y_test, data.client_test, test),
    ):
        assert owners is not None
        assert owners.tolist() == [user for user, _, _ in expected]
        assert y.tolist() == [label for _, _, label in expected]
        for ids, (_, row, _) in zip(x.tolist(), expected, strict=True):
            known = [2 + ranked.index(word) if word in ranked else UNKNOWN for word in split_words(row[4])[:6]]
            assert ids == known + [PADDING] * (6 - len(known))


@pytest.mark.parametrize(
    ("write", "make", "least"),
    [(write_femnist, FEMNIST, 1), (write_shakespeare, Shakespeare, 9), (write_sent140, Sent140, 1)],
)
def test_users_are_the_clients(write: Callable[[Path], Any], make: type, least: int, tmp_path: Path) -> None:
    train, test = write(tmp_path)
    data = Scenario(make(str(tmp_path)), ByClient(least)).build(0)
    users = sorted(user for user in train if len(train[user][1]) >= least)
    assert data.client_ids == users
    assert [(len(shard.train), len(shard.test)) for shard in data.shards] == [
        (len(train[user][1]), len(test[user][1])) for user in users
    ]
    assert len(users) == len(train) - (make is Shakespeare)  # one role has a single character


# --- Refusals ---


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return damage


def of_first(part: str, change: Callable[[list[Any]], object]) -> Callable[[Path], None]:
    return changed(lambda content: change(content["user_data"][content["users"][0]][part]))


def put(index: int, value: Any) -> Callable[[list[Any]], None]:
    return lambda values: values.__setitem__(index, value)


def rename_second(name: str) -> Callable[[Path], None]:
    def rename(content: dict[str, Any]) -> None:
        content["user_data"][name] = content["user_data"][content["users"][1]]
        content["users"][1] = name

    return changed(rename)


FIRST = "user 'f0000_00'"
KEYS = "it needs users, num_samples, user_data"
ROWS = "x must hold rows of 784 numbers"
PIXELS = "x must hold pixels from 0 to 1"
CLASSES = "y must hold integers from 0 to 61"


def rows_of(row: list[Any]) -> Callable[[Path], None]:
    """The first user's images, each replaced by one row."""
    return of_first("x", lambda x: x.__setitem__(slice(None), [row] * 12))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no users": (changed(lambda content: content.pop("users")), KEYS),
    "list": (lambda path: path.write_text("[1]"), KEYS),
    "too few sizes": (changed(lambda content: content["num_samples"].pop()), "it has 2 users, but num_samples of 1"),
    "unknown user": (
        changed(lambda content: (content["users"].append("x"), content["num_samples"].append(1))),
        "user 'x' is not in user_data",
    ),
    "too few labels": (of_first("y", list.pop), f"{FIRST} has 12 x and 11 y, but num_samples is 12"),
    "no labels": (changed(lambda content: content["user_data"]["f0000_00"].pop("y")), "not a readable LEAF file ('y')"),
    "NUL": (rename_second("f0000_00\0"), r"user 'f0000_00\x00' ("),
    "two files": (rename_second("f0014_02"), "user 'f0014_02' (appears twice)"),
    "one small image": (of_first("x", put(3, [0.5] * 783)), FIRST),
    "small images": (rows_of([0.5]), ROWS),
    "text": (rows_of(["1"] * 784), ROWS),
    "pixels to 255": (of_first("x", put(0, [255] * 784)), PIXELS),
    "NaN": (of_first("x", put(0, [float("nan")] * 784)), PIXELS),
    "class 62": (of_first("y", put(0, 62)), CLASSES),
    "class true": (of_first("y", put(0, True)), CLASSES),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_the_message_names_the_damaged_file(case: str, tmp_path: Path) -> None:
    write_femnist(tmp_path)
    damage, expected = DAMAGE[case]
    folder = tmp_path / "femnist" / "data" / "train"
    damage(folder / "all_data_0_niid_0_keep_0_train_8.json")
    second = int(case == "two files")  # where the name comes up again
    file = f": {folder}/all_data_{second}_niid_0_keep_0_train_8.json: "
    check_refused(FEMNIST(str(tmp_path)), "dataset", file, expected)


@pytest.mark.parametrize(
    ("write", "make", "name", "user", "x", "y", "expected"),
    [
        (*PLAYS, ROLE, [" " * 79], ["A"], "texts of 80 characters"),
        (*PLAYS, ROLE, [" " * 80], ["é"], "one of LEAF's 80 characters"),
        (*PLAYS, ROLE, [" " * 80], ["AB"], "one of LEAF's 80 characters"),
        (*TWEETS, "_bert_", ["a tweet"], [0], "rows whose last column"),
        (*TWEETS, "_bert_", [["1", None]], [0], "rows whose last column"),
        (*TWEETS, "_bert_", [["1", "a"]], [4], "integers from 0 to 1"),
    ],
)
def test_the_message_names_the_user_of_a_bad_text(
    write: Callable[[Path], Any], make: type, name: str, user: str, x: Any, y: Any, expected: str, tmp_path: Path
) -> None:
    write(tmp_path)
    for path in (tmp_path / name / "data" / "train").iterdir():
        content = json.loads(path.read_text())
        if user in content["users"]:
            content["user_data"][user] = {"x": x, "y": y}
            content["num_samples"][content["users"].index(user)] = 1
            path.write_text(json.dumps(content))
    check_refused(make(str(tmp_path)), "dataset", expected, f"user {user!r}")


def test_folders_without_samples_are_refused(tmp_path: Path) -> None:
    write_femnist(tmp_path)
    train = tmp_path / "femnist" / "data" / "train"
    (train / "README.md").write_text("is ignored")
    (train / ".all_data_9.json").write_text("is ignored, too")
    FEMNIST(str(tmp_path)).checked()
    for path in train.glob("*.json"):
        if not path.name.startswith("."):
            path.write_text(json.dumps({"users": ["a"], "num_samples": [0], "user_data": {"a": {"x": [], "y": []}}}))
            if "_0_niid" not in path.name:
                path.unlink()
    check_refused(FEMNIST(str(tmp_path)), "dataset", f"{train}: ", "no samples")
    (train / "all_data_0_niid_0_keep_0_train_8.json").unlink()
    check_refused(FEMNIST(str(tmp_path)), "dataset", f"{train}: ", "no .json files")
