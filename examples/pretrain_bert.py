"""Pretrain a small BERT on the training texts of AG News, without their labels, for docs/adapters.md.

    python examples/pretrain_bert.py --data_dir data --out small-bert

The model learns to predict masked words (Devlin et al., 2019). Its folder is read by `Pretrained` in the configs of the
documentation. Nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM

from fl_lightning import AGNews

LENGTH, WORDS = 32, 5000
"""Words per text, and size of the vocabulary."""
MASKED, MASK = 0.15, 1
"""Share of words that are masked, and the id that replaces them: that of unknown words."""


def main() -> None:
    """Pretrain the model, and write its folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", default="data", help="folder with ag_news_csv/")
    parser.add_argument("--out", default="small-bert", help="folder to write")
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()
    torch.manual_seed(0)
    texts = AGNews(given.data_dir, length=LENGTH, vocab_size=WORDS).load().x_train
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
    )
    model = BertForMaskedLM(config).train()
    steps = given.epochs * -(-len(texts) // 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps, pct_start=0.1)
    for epoch in range(given.epochs):
        losses = []
        for rows in torch.randperm(len(texts)).split(64):
            ids = texts[rows]
            masked = (torch.rand(ids.shape) < MASKED) & (ids > 1)
            outputs = model(input_ids=ids.masked_fill(masked, MASK), attention_mask=(ids > 0).long())
            loss = F.cross_entropy(outputs.logits[masked], ids[masked])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1} of {given.epochs}: loss {sum(losses) / len(losses):.3f}", flush=True)
    model.save_pretrained(given.out)


if __name__ == "__main__":
    main()
