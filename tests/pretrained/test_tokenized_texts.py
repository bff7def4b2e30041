"""Hugging Face tokenizers in local folders, and GPT-2 and BERT of random weights on their tokens, without a network."""

import json
import math
import re
import shlex
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import rows, run
from experiments import assert_near, experiment
from layouts import write_text_table
from refusals import refusal
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.inputs import Inputs
from fl_lightning.data import ByClient, InstructionFile, Scenario, TextFile, TextTable
from fl_lightning.data.tokenizers import HuggingFaceTokenizer, load_tokenizer

pytestmark = pytest.mark.usefixtures("no_network")
# A namespace package of this folder's name has no version.
transformers = pytest.importorskip("transformers", minversion="4.57")
tokenizers = pytest.importorskip("tokenizers")

WORDS = [*"abcd", "good", "bad", "film", "number", "user", "assistant", *":,.", *"0123456789"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} : {% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }} [SEP]{% endgeneration %}"
    "{% else %}{{ message['content'] }} [SEP]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """Return a function that writes a tokenizer of words, like that of BERT or of GPT-2, and returns its folder."""

    def write(kind: str, template: str | None = None) -> str:
        vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
        model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        if kind == "bert":
            ends = [("[CLS]", 2), ("[SEP]", 3)]
            model.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
            special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        else:
            special = {"unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]"}
        library = transformers.PreTrainedTokenizerFast(tokenizer_object=model, **special)
        library.chat_template = template
        library.save_pretrained(path := str(tmp_path / kind))
        return path

    return write


class TinyGPT2(nn.Module):
    """GPT-2 of random weights."""

    def __init__(self, num_classes: int, positions: int = 64) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=num_classes,
            n_positions=positions,
            n_embd=16,
            n_layer=1,
            n_head=2,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
        self.net = transformers.GPT2LMHeadModel(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.net(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


class SmallVocabulary(TinyGPT2):
    """GPT-2 with fewer token ids than the tokenizer."""

    def __init__(self) -> None:
        super().__init__(5)


class TinyBert(nn.Module):
    """BERT of random weights, for classification."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=len(SPECIAL) + len(WORDS),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_labels=num_classes,
            **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        )
        self.net = transformers.BertForSequenceClassification(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.net(input_ids=input_ids, attention_mask=attention_mask).logits


def write_sites(root: Path) -> str:
    root.mkdir()
    for site, words in (("one", "a b c"), ("two", "a d c b")):
        (root / f"{site}.txt").write_text("\n".join(" ".join([words] * (1 + i % 4)) for i in range(10)))
    return str(root)


def language_run(tmp_path: Path, folder: Any, name: str = "run", **options: Any) -> Any:
    texts = tmp_path / "texts"
    path = str(texts) if texts.exists() else write_sites(texts)
    settings = {
        "scenario": Scenario(TextFile(path, tokenizer=folder("gpt"), length=24), ByClient()),
        "model": TinyGPT2,
        "rounds": 2,
        "clients_per_round": 2,
        "batch_size": 4,
        "optimizer": partial(torch.optim.Adam, lr=0.01),
    }
    return experiment(tmp_path / name, **settings | options)


@pytest.mark.parametrize(("kind", "ends"), [("bert", ([2], [3])), ("gpt", ([2], [3]))])
def test_a_folder_is_read_without_a_network(kind: str, ends: Any, folder: Any) -> None:
    tokenizer = load_tokenizer(folder(kind))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert (list(tokenizer.start), list(tokenizer.end)) == ends
    assert tokenizer.size == len(SPECIAL) + len(WORDS)
    assert tokenizer.ids(tokenizer.split("b a unseen")) == [5, 4, 1]


def test_texts_are_encoded_as_by_the_tokenizer_itself(tmp_path: Path, folder: Any) -> None:
    texts = write_text_table(tmp_path / "t.csv")["text"]
    path = folder("bert")
    dataset = TextTable(str(tmp_path / "t.csv"), tokenizer=path, length=7)
    dataset.test_share = 0.1
    data = dataset.checked()
    library = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    expected = library(texts, truncation=True, max_length=7, padding="max_length", return_tensors="pt")
    for name in ("input_ids", "attention_mask"):
        rows = torch.cat([data.x_train.tensors[name], data.x_test.tensors[name]])
        assert sorted(rows.tolist()) == sorted(expected[name].tolist())


def test_a_chat_template_is_learned_where_the_template_says(tmp_path: Path, folder: Any) -> None:
    messages = [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "a a"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"messages": messages})] * 5))
    path = folder("gpt", TEMPLATE)
    data = InstructionFile(str(tmp_path / "a.jsonl"), tokenizer=path, template="chat", length=24).checked()
    library = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    whole = library.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, learned = whole["input_ids"], whole["assistant_masks"]
    padded = 24 - len(ids)
    assert data.x_train.tensors["input_ids"][0].tolist() == ids + [0] * padded
    expected = [one if kept else -100 for one, kept in zip(ids, learned, strict=True)]
    assert data.y_train[0].tolist() == expected + [-100] * padded


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ messages | length }} {{ messages[-1]['content'] }}"]
)
def test_a_chat_template_that_cannot_be_split_is_refused(template: str, tmp_path: Path, folder: Any) -> None:
    messages = [{"role": role, "content": "a b"} for role in ("user", "assistant")]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
    dataset = InstructionFile(str(tmp_path / "a.jsonl"), tokenizer=folder("gpt", template), template="chat")
    assert refusal(dataset).startswith(f"scenario.dataset.path: {tmp_path / 'a.jsonl'}: line 1: ")


def test_the_perplexity_is_that_of_the_library_on_single_texts(tmp_path: Path, folder: Any) -> None:
    run = language_run(tmp_path, folder)
    run.fit()
    network = run.worker.modules.build_shared(run.state["model"]).backbone.eval()
    total, count = 0.0, 0
    ids, mask = (run.data.data.x_test.tensors[name] for name in ("input_ids", "attention_mask"))
    with torch.no_grad():
        for row, kept in zip(ids, mask, strict=True):
            text = row[kept != 0][None]
            total += float(network.net(input_ids=text, labels=text).loss) * (text.shape[1] - 1)
            count += text.shape[1] - 1
    perplexity = float(run.csv.rows[-1]["global/perplexity"])
    assert perplexity == pytest.approx(math.exp(total / count), rel=1e-5)
    assert perplexity < float(run.csv.rows[0]["global/perplexity"])


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_trimmed_batches_give_the_results_of_padded_ones(
    kind: str, tmp_path: Path, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1)}
    if kind == "bert":
        write_text_table(tmp_path / "t.csv")
        dataset = TextTable(str(tmp_path / "t.csv"), tokenizer=folder("bert"), length=24, client="author")
        options |= {"scenario": Scenario(dataset, ByClient()), "model": TinyBert}
    trimmed = language_run(tmp_path, folder, "trimmed", **options)
    trimmed.fit()
    monkeypatch.setattr(Inputs, "lengths", None)
    padded = language_run(tmp_path, folder, "padded", **options)
    padded.fit()
    assert_near(trimmed.state["model"], padded.state["model"], 1e-4)


@pytest.mark.thorough
def test_gpt2_learns_the_grammar_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "language-models.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    generator, *_ = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(generator, {})
    for title, block in re.findall(r'```\w+ title="(.+?)"\n(.*?)```', page, re.S):
        Path(title).write_text(block)
    (command,) = re.findall("^fl-lightning (fit .* gpt2.GPT2.*)$", page, re.M)
    code, _, err = run(*shlex.split(command), "--rounds", "6", "--run_dir", "run")
    assert code == 0, err
    first, *_, last = (float(row["global/perplexity"]) for row in rows(Path("run")))
    assert last < 3.5 < first


def test_a_network_with_too_few_token_ids_is_refused_before_the_run(tmp_path: Path, folder: Any) -> None:
    run = language_run(tmp_path, folder, model=SmallVocabulary)
    assert refusal(run.fit).startswith("model: ")


def test_a_vocabulary_smaller_than_that_of_the_tokenizer_is_refused(tmp_path: Path, folder: Any) -> None:
    path = write_sites(tmp_path / "texts")
    size = len(SPECIAL) + len(WORDS)
    assert refusal(TextFile(path, tokenizer=folder("gpt"), vocab_size=size - 1)).startswith(
        "scenario.dataset.vocab_size"
    )
    assert TextFile(path, tokenizer=folder("gpt"), vocab_size=size + 9).checked().num_classes == size + 9


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    assert refusal(lambda: load_tokenizer(str(tmp_path))).startswith("scenario.dataset.tokenizer")


def test_code_in_the_folder_is_not_run(tmp_path: Path, folder: Any) -> None:
    path = Path(folder("gpt"))
    (path / "own.py").write_text("raise SystemExit('run')")
    config = json.loads((path / "tokenizer_config.json").read_text())
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (path / "tokenizer_config.json").write_text(json.dumps(config | own))
    with suppress(ConfigError):
        load_tokenizer(str(path))
