"""Tiny models of Hugging Face with random weights, in folders, and texts and images for them."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from fl_lightning.data import Arrays, Dirichlet, Scenario
from fl_lightning.models import Adapted, LoRA, Pretrained

SMALL = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
}
GPT2 = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24, "bos_token_id": 1}
CONFIGS: dict[str, Any] = {
    "bert": lambda: transformers.BertConfig(**SMALL),
    "roberta": lambda: transformers.RobertaConfig(**SMALL),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=60, dim=16, hidden_dim=32, n_layers=2, n_heads=2, max_position_embeddings=24
    ),
    "gpt2": lambda: transformers.GPT2Config(**GPT2, eos_token_id=2, pad_token_id=0),
    "gpt2 without padding": lambda: transformers.GPT2Config(**GPT2, eos_token_id=2),
    "llama": lambda: transformers.LlamaConfig(**SMALL, pad_token_id=0),
    "gemma": lambda: transformers.Gemma2Config(
        **SMALL, pad_token_id=0, final_logit_softcapping=0.5, num_key_value_heads=2, head_dim=8
    ),
    "vit": lambda: transformers.ViTConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        num_channels=1,
    ),
}
TASKS = {
    "sequence_classification": transformers.AutoModelForSequenceClassification,
    "token_classification": transformers.AutoModelForTokenClassification,
    "causal_lm": transformers.AutoModelForCausalLM,
    "image_classification": transformers.AutoModelForImageClassification,
}
NO_DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
TARGETS = {"bert": ["query", "value"], "gpt2": ["c_attn", "c_proj"], "vit": ["query", "value"]}


class Residual(torch.nn.Module):
    """A user's module with a skip connection, whose layers have other names than `encoder` and `head`."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.first = torch.nn.Flatten(), torch.nn.Linear(12, 8)
        self.second, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of images `(B, 3, 2, 2)`."""
        x = self.first(self.flat(x)).relu()
        return self.last(x + self.second(x).relu())


def save_model(folder: Path, name: str, task: str = "sequence_classification", labels: int = 2, **config: Any) -> Path:
    """Save a model with random weights, larger than initial ones, and return its folder.

    Args:
        folder: The folder.
        name: The model.
        task: What it predicts.
        labels: Number of classes.
        **config: Further entries of its configuration.
    """
    first = CONFIGS[name]()
    model = TASKS[task].from_config(type(first).from_dict(first.to_dict() | {"num_labels": labels} | config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder


def save_texts(path: Path, samples: int = 160, length: int = 10, seed: int = 0) -> Path:
    """Save texts of random tokens with their masks, whose class is that of the first token, and return the file."""
    rng = np.random.default_rng(seed)
    ids, lengths = rng.integers(1, 60, (samples, length)), rng.integers(4, length + 1, (samples, 1))
    mask = (np.arange(length) < lengths).astype(np.int64)
    arrays, labels = {}, (ids[:, 0] > 30).astype(np.int64)
    for split, rows in (("train", slice(samples * 3 // 4)), ("test", slice(samples * 3 // 4, None))):
        arrays |= {f"x_{split}_input_ids": (ids * mask)[rows], f"x_{split}_attention_mask": mask[rows]}
        arrays[f"y_{split}"] = labels[rows]
    np.savez(path, **arrays)
    return path


def text_options(folder: Path, name: str = "bert", rank: int = 3, dropout: float = 0.0) -> dict[str, Any]:
    """Return options of an experiment that trains adapters of a tiny model without dropout on texts."""
    path, texts = folder / name, folder / "texts.npz"
    if not path.exists():
        save_model(path, name, **NO_DROPOUT[name])
        save_texts(texts)
    return {
        "scenario": Scenario(Arrays(str(texts)), Dirichlet(1.0, min_samples=12), 4),
        "model": partial(
            Adapted,
            base=partial(Pretrained, path=str(path)),
            adapter=LoRA(r=rank, alpha=2 * rank, targets=TARGETS[name], dropout=dropout),
        ),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "clients_per_round": 3,
        "batch_size": 16,
        "trainer": {"accelerator": "cpu", "max_epochs": 1},
    }
