"""Instructions in JSONL files: the template, the labels of responses only, clients, and wrong lines."""

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refusal

from fl_lightning.data import ByClient, InstructionFile, Scenario
from fl_lightning.data.instructions import messages_of, plain_pieces
from fl_lightning.data.tokenizers import ByteTokenizer

END = "\x02"
PROMPT = {"prompt": "Add 1 and 1.", "response": "2"}
INSTRUCTION = {"instruction": "Add.", "input": "1 and 1", "output": "2"}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Ciao"},
    ]
}


def write_jsonl(path: Path, records: list[Any]) -> str:
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in records))
    return str(path)


def decoded(tokens: Any) -> str:
    """Return the text of byte tokens, with a mark at the start and end of a text."""
    return "".join(END if token == 2 else chr(token - 3) for token in tokens)


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (PROMPT, ["\x02### Instruction:\nAdd 1 and 1.\n\n### Response:\n", "2\x02"]),
        (INSTRUCTION, ["\x02### Instruction:\nAdd.\n\n### Input:\n1 and 1\n\n### Response:\n", "2\x02"]),
        (INSTRUCTION | {"input": ""}, ["\x02### Instruction:\nAdd.\n\n### Response:\n", "2\x02"]),
        (
            CHAT,
            [
                "\x02### System:\nBe short.\n\n### Instruction:\nHi\n\n### Response:\n",
                "Hello\x02",
                "### Instruction:\nBye\n\n### Response:\n",
                "Ciao\x02",
            ],
        ),
    ],
)
def test_only_responses_and_their_ends_are_learned(record: dict, parts: list[str], tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [record] * 5)
    data = InstructionFile(path, tokenizer="bytes", length=120).checked()
    ids, mask = data.x_train.tensors["input_ids"][0], data.x_train.tensors["attention_mask"][0]
    assert decoded(ids[mask != 0].tolist()) == "".join(parts)
    by_hand: list[int] = []
    for i, part in enumerate(parts):
        codes = [2 if letter == END else ord(letter) + 3 for letter in part]
        by_hand += codes if i % 2 else [-100] * len(codes)
    assert data.y_train[0].tolist() == by_hand + [-100] * (120 - len(by_hand))


def test_long_lines_are_truncated_at_their_end(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [PROMPT | {"response": "12345"}] * 5)
    tokens = [token for part, _ in plain_pieces(messages_of(PROMPT), ByteTokenizer()) for token in part]
    length = len(tokens)  # two tokens of the response
    data = InstructionFile(path, tokenizer="bytes", length=length).checked()
    assert data.y_train[0][-2:].tolist() == [ord("1") + 3, ord("2") + 3]
    assert bool((data.y_train[0][:-2] == -100).all())


def test_words_are_counted_in_the_training_lines(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "response": "yes"}] * 4)
    test = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "p", "response": "no"}])
    data = InstructionFile(train, length=16, test_path=test).checked()
    (label, end), (unknown, _) = (y[y != -100].tolist() for y in (data.y_train[0], data.y_test[0]))
    assert (end, unknown) == (2, 1)
    assert label > 2
    assert data.num_classes == len(data.x_train.tensors["input_ids"].unique()) - 1 + 2  # padding and unknown


def test_a_field_names_the_clients(tmp_path: Path) -> None:
    records = [PROMPT | {"site": site, "response": site} for site in ("b", "a") for _ in range(6)]
    data = Scenario(InstructionFile(write_jsonl(tmp_path / "a.jsonl", records), client="site"), ByClient()).build(0)
    assert data.names.clients == ["a", "b"]
    answers = [{tuple(y[y != -100].tolist()) for y in data.data.y_train[data.shard(k).train]} for k in (0, 1)]
    assert [len(own) for own in answers] == [1, 1]
    assert answers[0] != answers[1]


def test_blank_lines_and_other_fields_do_not_matter(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [PROMPT | {"id": 3}, "", "  ", *[PROMPT] * 4])
    data = InstructionFile(path).checked()
    assert len(data.y_train) + len(data.y_test) == 5


def test_a_byte_order_mark_is_left_out(tmp_path: Path) -> None:
    path = Path(write_jsonl(tmp_path / "a.jsonl", [PROMPT] * 5))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(InstructionFile(str(path)).checked().y_train) == 4


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        "[" * 100_000,
        "3",
        '["a"]',
        "{}",
        {"prompt": "a"},
        {"response": "a"},
        {"prompt": "a", "response": ""},
        {"prompt": "a", "response": " \n"},
        {"prompt": "a", "response": 3},
        {"prompt": None, "response": "a"},
        {"instruction": "a", "response": "b"},
        {"instruction": "a", "input": 3, "output": "b"},
        {"messages": "a"},
        {"messages": []},
        {"messages": ["a"]},
        {"messages": [{"role": "robot", "content": "a"}]},
        {"messages": [{"role": ["user"], "content": "a"}]},
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "assistant"}]},
        {"messages": [{"role": "assistant", "content": ""}]},
    ],
)
def test_a_wrong_line_is_refused_by_its_number(line: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [PROMPT, "", line])
    assert refusal(InstructionFile(path)).startswith(f"scenario.dataset.path: {path}: line 3: ")


@pytest.mark.parametrize("client", [None, 1.5, True, "a\0", ["a"], " "])
def test_a_line_without_a_client_is_refused_by_its_number(client: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [PROMPT | {"site": "a"}, PROMPT | {"site": client}])
    assert refusal(InstructionFile(path, client="site")).startswith(f"scenario.dataset.path: {path}: line 2: ")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"length": 3}, "scenario.dataset.length"),
        ({"template": "alpaca"}, "scenario.dataset.template"),
        ({"template": "chat"}, "scenario.dataset.template"),
        ({"vocab_size": 2}, "scenario.dataset.vocab_size"),
        ({"test_path": "none.jsonl"}, "scenario.dataset.test_path"),
    ],
)
def test_wrong_options_are_refused_by_their_key(options: dict, key: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [PROMPT] * 5)
    assert refusal(lambda: InstructionFile(path, **options)).startswith(key)
