"""Write a tiny pretrained BERT and texts of random tokens, to try adapters without a download.

The BERT learns which quarter of the vocabulary is the most frequent in a text. The texts are for another task: their
class is 1 if most of their tokens are from the second half of the vocabulary.

Run it with `python examples/tiny_bert.py`. It needs `fl-lightning[transformers]`, and takes seconds.
"""

import numpy as np
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

VOCABULARY, LENGTH, PADDING = 201, 24, 0
PARTS = 4


def random_texts(rng: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return token ids `(n, LENGTH)`, masks, and the number of tokens from each quarter of the vocabulary `(n, 4)`."""
    mask = (np.arange(LENGTH) < rng.integers(LENGTH // 2, LENGTH + 1, (samples, 1))).astype(np.int64)
    shares = rng.dirichlet(np.ones(PARTS), samples)
    parts = np.stack([rng.choice(PARTS, LENGTH, p=share) for share in shares])
    ids = (1 + rng.integers(0, VOCABULARY // PARTS, parts.shape) + parts * (VOCABULARY // PARTS)) * mask
    counts = np.stack([((parts == part) * mask).sum(axis=1) for part in range(PARTS)], axis=1)
    return ids, mask, counts


def write_model(folder: str, steps: int = 300) -> None:
    """Pretrain a BERT with two layers, and write it without its head, as `save_pretrained` writes any model."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        num_labels=PARTS,
        pad_token_id=PADDING,
    )
    model, rng = BertForSequenceClassification(config).train(), np.random.default_rng(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for _ in range(steps):
        ids, mask, counts = map(torch.from_numpy, random_texts(rng, 64))
        F.cross_entropy(model(ids, mask).logits, counts.argmax(dim=1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.bert.save_pretrained(folder)


def write_texts(path: str, samples: int = 600) -> None:
    """Write token ids and attention masks of training and test texts, with the class of each text."""
    ids, mask, counts = random_texts(np.random.default_rng(0), samples)
    labels = (counts[:, 2:].sum(axis=1) > mask.sum(axis=1) / 2).astype(np.int64)
    arrays, training = {}, samples * 3 // 4
    for split, rows in (("train", slice(training)), ("test", slice(training, None))):
        arrays |= {f"x_{split}_input_ids": ids[rows], f"x_{split}_attention_mask": mask[rows]}
        arrays[f"y_{split}"] = labels[rows]
    np.savez(path, **arrays)


if __name__ == "__main__":
    write_model("tiny-bert")
    write_texts("tokens.npz")
    print("wrote tiny-bert and tokens.npz")
