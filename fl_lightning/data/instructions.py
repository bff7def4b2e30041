"""Instructions and responses in JSONL files, to fine-tune causal language models on the responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Literal

from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.data.custom_data import existing_path
from fl_lightning.data.datasets import KEY
from fl_lightning.data.files import BadFile, read_text
from fl_lightning.data.token_texts import TokenText, TokenTexts
from fl_lightning.data.tokenizers import HuggingFaceTokenizer, Token, Tokenizer

HEADINGS = {"system": "System", "user": "Instruction", "assistant": "Response"}
"""Headings of the plain template, by the role of a message."""

Message = dict[str, str]
"""A message of a conversation: its `role` and its `content`."""
Pieces = list[tuple[Sequence[Token], bool]]
"""Consecutive tokens of a conversation, and whether they are learned."""


class InstructionFile(TokenTexts):
    """Custom instructions with responses in a JSONL file, for a causal language model that learns the responses.

    Each line is a JSON object in one of three forms: `prompt` and `response`; `instruction`, `input` (optional) and
    `output`; or `messages`, a list of objects with `role` (`system`, `user` or `assistant`) and `content`. Only the
    tokens of responses and of the end after each of them have a loss. The `plain` template is

        ### Instruction:
        {instruction or prompt}

        ### Input:
        {input, if there is one}

        ### Response:
        {response}

    with `### System:` before a system message. Lines with more than `length` tokens are truncated.

    Args:
        path: The file.
        tokenizer: `words`, `bytes`, or the folder of a Hugging Face tokenizer.
        length: Largest number of tokens of a sample, at least 2.
        vocab_size: Number of token ids, which is the number of the network's outputs. By default that of the tokenizer;
            for words, at most 10,000.
        client: Field with the client of each line, text or an integer, for the partition `ByClient`.
        template: How a conversation is written as a text: `plain`, or `chat` for the tokenizer's own chat template.
        test_path: A second file with the test samples.
        test_share: Share of the samples, or of each client's samples, to test on if there is none.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str = "words",
        length: int = 512,
        vocab_size: int | None = None,
        client: str | None = None,
        template: Literal["plain", "chat"] = "plain",
        test_path: str | None = None,
        test_share: float = 0.2,
    ) -> None:
        super().__init__(path, tokenizer, length, vocab_size, test_path, test_share)
        if template not in ("plain", "chat"):
            raise ConfigError(f"{KEY}.template: {one_line(repr(template))} is neither plain nor chat. Set one of them")
        self.client, self.template = client, template

    def _read(self, key: str, path: str, tokenizer: Tokenizer) -> Iterator[TokenText]:
        try:
            lines = read_text(existing_path(path, key=key)).split("\n")
        except BadFile as error:
            raise ConfigError(f"{KEY}.{key}: {error}. Replace it") from error
        chat = chat_tokenizer(tokenizer) if self.template == "chat" else None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{one_line(path)}: line {number}"
            try:
                record = parse_record(line)
                messages = messages_of(record)
                client = None if self.client is None else client_of(record, self.client)
                pieces = chat_pieces(messages, chat) if chat else plain_pieces(messages, tokenizer)
            except ValueError as error:
                raise ConfigError(f"{KEY}.{key}: {where}: {error}") from error
            tokens = list(chain(*(part for part, _ in pieces)))
            learned = [kept for part, kept in pieces for _ in part]
            if not any(learned[1 : self.length]):
                what = f"no token of the response is among the first {self.length} of {len(tokens)} tokens"
                raise ConfigError(f"{KEY}.length: {where}: {what}. Raise it, or remove the line")
            yield TokenText(tokens, learned, client)


def parse_record(line: str) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        ValueError: It is no JSON object.
    """
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"is not JSON ({one_line(error)}). Write one JSON object per line") from error
    if not isinstance(record, dict):
        raise ValueError(f"is JSON of type {type(record).__name__}. Write one JSON object per line")
    return record


def messages_of(record: dict[str, Any]) -> list[Message]:
    """Return the conversation of a line, in any of the three forms, as messages with `role` and `content`.

    Raises:
        ValueError: A field is missing or no text, or there is no response.

    Example:
        >>> messages_of({"prompt": "1 + 1 =", "response": "2"})
        [{'role': 'user', 'content': '1 + 1 ='}, {'role': 'assistant', 'content': '2'}]
    """
    if "messages" in record:
        messages = [check_message(message) for message in check_list(record["messages"])]
    else:
        question, answer = ("instruction", "output") if "instruction" in record else ("prompt", "response")
        asked = text_of(record, question)
        if record.get("input") not in (None, ""):
            asked = f"{asked}\n\n### Input:\n{text_of(record, 'input')}"
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": text_of(record, answer)}]
    responses = [message["content"] for message in messages if message["role"] == "assistant"]
    if not responses or not all(response.strip() for response in responses):
        raise ValueError(f"has {'an empty' if responses else 'no'} response. Write one, or remove the line")
    return messages


def check_list(messages: Any) -> list[Any]:
    """Check that the value of `messages` is a list, and return it."""
    if not isinstance(messages, list):
        raise ValueError("messages is no list. Write a list of objects with role and content")
    return messages


def check_message(message: Any) -> Message:
    """Check that a message has a known role and a text, and return these two."""
    if not isinstance(message, dict) or message.get("role") not in [*HEADINGS]:
        raise ValueError(f"has a message whose role is none of {', '.join(HEADINGS)}. Correct or remove it")
    return {"role": message["role"], "content": text_of(message, "content")}


def text_of(record: dict[str, Any], field: str) -> str:
    """Return the text in a field of a line."""
    if field not in record:
        raise ValueError(f"has no field {field!r}. Its fields are {one_line(', '.join(record)) or 'none'}")
    if not isinstance(record[field], str):
        raise ValueError(f"the field {field!r} is of type {type(record[field]).__name__}. Write a text")
    return record[field]


def client_of(record: dict[str, Any], field: str) -> str | int:
    """Return the client that a field of a line names."""
    client = record.get(field)
    if not isinstance(client, str | int) or isinstance(client, bool) or not str(client).strip() or "\0" in str(client):
        raise ValueError(f"names no client in the field {field!r}. Write a text or an integer")
    return client


def plain_pieces(messages: Sequence[Message], tokenizer: Tokenizer) -> Pieces:
    """Return a conversation in the plain template, as tokens in pieces that are learned or not."""
    pieces: Pieces = [(tokenizer.start, False)]
    for message in messages:
        heading, content = f"### {HEADINGS[message['role']]}:\n", message["content"]
        if message["role"] == "assistant":
            pieces += [(tokenizer.split(heading), False), ([*tokenizer.split(content), *tokenizer.end], True)]
        else:
            pieces.append((tokenizer.split(f"{heading}{content}\n\n"), False))
    return pieces


def chat_tokenizer(tokenizer: Tokenizer) -> Any:
    """Return the Hugging Face tokenizer with its chat template.

    Raises:
        ConfigError: It has none.
    """
    library = tokenizer.library if isinstance(tokenizer, HuggingFaceTokenizer) else None
    if not getattr(library, "chat_template", None):
        raise ConfigError(f"{KEY}.template: the tokenizer has no chat template. Set it to plain")
    return library


def chat_pieces(messages: Sequence[Message], library: Any) -> Pieces:
    """Return a conversation in the tokenizer's chat template, as tokens in pieces that are learned or not.

    What the template adds to the conversation by a response is learned, without the beginning that prompts for it.

    Raises:
        ValueError: The template fails, or does not write a conversation as the beginning of a longer one.
    """
    pieces: Pieces = []
    seen: list[int] = []

    def add(count: int, learned: bool, **options: Any) -> None:
        try:
            ids = library.apply_chat_template(list(messages[:count]), tokenize=True, return_dict=False, **options)
        except Exception as error:  # of jinja, or raised by the template
            raise ValueError(f"the chat template fails ({one_line(error)}). Set template to plain") from error
        if ids[: len(seen)] != seen:
            raise ValueError("the chat template changes earlier messages. Set template to plain")
        pieces.append((ids[len(seen) :], learned))
        seen[:] = ids

    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            add(i, False, add_generation_prompt=True)
            add(i + 1, True)
    return pieces
