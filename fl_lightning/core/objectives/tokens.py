"""Objectives whose labels are one class for each token of a text."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.core.objectives.base import Objective, Reduction, check_range, describe_tensor
from fl_lightning.core.precision import at_least_float32

IGNORED_TOKEN = -100
"""Label of tokens that are not used, as in Hugging Face's models."""


class TokenClassification(Objective):
    """One of `C` classes for each token of a text, with cross-entropy and token accuracy (`acc`).

    The label -100 marks tokens that are not used, such as padding. The loss and the accuracy are means over the used
    tokens of all texts together, so a long text counts more than a short one, and padding does not count.
    """

    term, kind, count, fewest, token_labels = "ce", "Multiclass", "num_classes", 2, True
    bounds: ClassVar = {"acc": (0.0, 1.0)}

    def output_shape(self, labels: Tensor, outputs: int) -> tuple[int, ...]:
        """Return `(length, C)`: one logit for each token and class."""
        return (*labels.shape[1:], outputs)

    def expected(self, targets: Tensor) -> Tensor:
        """Return the class that the outputs at each position are compared with, `(B, length)`: the labels."""
        return targets

    def units(self, targets: Tensor) -> Tensor:
        """Return the number of used tokens in a batch."""
        return (self.expected(targets) != IGNORED_TOKEN).sum()

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the cross-entropy of logits `(B, length, C)` and labels `(B, length)`; 0 if no token is used."""
        logits, classes = at_least_float32(outputs).flatten(0, 1), self.expected(targets).flatten()
        loss = F.cross_entropy(logits, classes, ignore_index=IGNORED_TOKEN, reduction="sum")
        return loss if reduction == "sum" else loss / self.units(targets).clamp(min=1)

    def check(self, labels: Tensor, outputs: int) -> None:
        """Check that labels are class indices or -100, int64, `(n, length)`, and that each text has a used token."""
        if labels.dtype != torch.int64 or labels.ndim != 2:
            raise ValueError(f"needs one class per token, int64 (n, length), got {describe_tensor(labels)}")
        expected = self.expected(labels)
        used = expected != IGNORED_TOKEN
        if not bool(used.any(dim=1).all()):
            raise ValueError(f"has no label in sample {int(used.any(dim=1).int().argmin())}. Remove the sample")
        check_range(expected[used], outputs)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the number of correct tokens (`acc`) and the summed cross-entropy (`loss`) of a batch."""
        correct = (outputs.argmax(dim=2) == self.expected(targets)).sum()
        return {"acc": correct.float(), "loss": self.loss(outputs, targets, "sum")}

    def predictions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the softmax probabilities `(N, C)` and the classes `(N,)` of the N used tokens."""
        expected = self.expected(targets)
        used = expected != IGNORED_TOKEN
        return outputs[used].softmax(dim=1), expected[used]


class CausalLM(TokenClassification):
    """Causal language modelling: each token is predicted from those before it. The metric `perplexity` is `exp(loss)`.

    Labels are token ids, aligned with the inputs as in Hugging Face's models: the output at a position is compared with
    the label of the next position, so the first token has no loss. The label -100 marks tokens that are not used, such
    as padding, or the prompt of an instruction. The perplexity is that of a whole set: the exponential of the mean loss
    over its used tokens, not a mean of perplexities.
    """

    bounds: ClassVar = {"acc": (0.0, 1.0), "perplexity": (1.0, float("inf"))}

    def expected(self, targets: Tensor) -> Tensor:
        """Return the label of the next position, `(B, length)`; -100 at the last position, which has none."""
        return F.pad(targets[:, 1:], (0, 1), value=IGNORED_TOKEN)

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Add the perplexity to the means of a set; infinite if it is too large for a float64."""
        return means | {"perplexity": float(torch.tensor(means["loss"], dtype=torch.float64).exp())}
