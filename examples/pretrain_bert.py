"""Pretrain a small BERT on a third of the training texts of AG News, for the comparison in docs/adapters.md.

    python examples/pretrain_bert.py --data_dir data --clients clients --out small-bert

The first third of `data/ag_news_csv/train.csv` is public, and the model learns its classes. The rest and the test set
are written to `clients/ag_news_csv/`, as the data of the clients. The model is saved without its head. Nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import csv
import shutil
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

from fl_lightning.data.text import Vocabulary

LENGTH, WORDS = 32, 5000
"""Words per text, and size of the vocabulary, which is that of the clients' texts."""


def main() -> None:
    """Split the data, pretrain the model, and write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", default="data", help="folder with ag_news_csv/")
    parser.add_argument("--clients", default="clients", help="folder to write the clients' data to")
    parser.add_argument("--out", default="small-bert", help="folder to write the model to")
    parser.add_argument("--epochs", type=int, default=4)
    given = parser.parse_args()
    torch.manual_seed(0)
    public, private = split(Path(given.data_dir, "ag_news_csv"), Path(given.clients, "ag_news_csv"))
    ids = Vocabulary((text for _, text in private), WORDS).encode((text for _, text in public), LENGTH)
    labels = torch.tensor([int(label) - 1 for label, _ in public])
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        num_labels=4,
    )
    model = BertForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for epoch in range(given.epochs):
        losses = []
        for rows in torch.randperm(len(ids)).split(32):
            outputs = model(input_ids=ids[rows], attention_mask=(ids[rows] > 0).long())
            loss = F.cross_entropy(outputs.logits, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1} of {given.epochs}: loss {sum(losses) / len(losses):.3f}", flush=True)
    model.bert.save_pretrained(given.out)


def split(source: Path, target: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Write the clients' part of the data, and return the public and the clients' texts with their labels."""
    with source.joinpath("train.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    public, private = rows[: len(rows) // 3], rows[len(rows) // 3 :]
    target.mkdir(parents=True)
    with target.joinpath("train.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(private)
    shutil.copy(source / "test.csv", target)
    return [(row[0], " ".join(row[1:])) for row in public], [(row[0], " ".join(row[1:])) for row in private]


if __name__ == "__main__":
    main()
