"""Audit of privacy: an attack on the global model that tells training samples from others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.attacks.canaries import Canaries
from fl_lightning.callbacks.base import RoundCallback
from fl_lightning.client.fine_tuning import fine_tune
from fl_lightning.core.errors import ConfigError, check_number, check_positive
from fl_lightning.core.precision import at_least_float32
from fl_lightning.core.seeding import Stream, generator, seed_everything
from fl_lightning.engines.trainer import inference
from fl_lightning.privacy.audit import audit_canaries, audit_scores

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun
    from fl_lightning.client.module import ClientModule
    from fl_lightning.evaluation.round_metrics import RoundMetrics

Samples = list[tuple[Any, Tensor]]
"""Batches of prepared samples with their labels, on the training device."""

FEWEST = 8
"""Smallest number of members, and of other samples, of an audit."""


class MembershipAudit(RoundCallback):
    """Attack the global model: find out which samples it was trained on. Works with and without `dp_sgd`.

    Members are training samples of all clients, and non-members are samples of the global test set. There are two
    attacks: `loss`, which takes samples with a small loss for members (Yeom et al., CSF 2018), and `lira`, which
    compares the model with reference models that were not trained on the sample (Carlini et al., "Membership Inference
    Attacks From First Principles", IEEE S&P 2022; the offline attack with one variance for all samples). References are
    trained on half of the test samples, and the other half is attacked.

    Logs, for each attack, `audit/<attack>_auc` (0.5 for guesses), `audit/<attack>_advantage` (the true positive rate
    minus the false positive rate; 0 for guesses), and `audit/<attack>_epsilon`, a lower bound of epsilon.

    With the adversary `Canaries`, it also guesses from the model's losses which of them were in the training data:
    `audit/canary_accuracy` (0.5 for random guesses) and `audit/canary_epsilon`. The other attacks leave canaries out.

    Args:
        every: Rounds between audits. By default only the last round.
        samples: Largest number of members and of non-members.
        references: Number of reference models of `lira`; 0 leaves it out.
        epochs: Number of epochs that a reference model is trained.
        confidence: The probability with which a bound of epsilon holds, in (0, 1).

    Raises:
        ConfigError: An option is out of range, targets are not classes, or there is no global model or test set.
    """

    def __init__(
        self,
        every: int | None = None,
        samples: int = 1000,
        references: int = 4,
        epochs: int = 10,
        confidence: float = 0.95,
    ) -> None:
        key = "callbacks: MembershipAudit."
        check_positive(key, every=every, epochs=epochs)
        check_number(f"{key}samples", samples, f"[{FEWEST}, inf)")
        check_number(f"{key}references", references, "[0, inf)", "0 leaves lira out")
        check_number(f"{key}confidence", confidence, "(0, 1)")
        self.every, self.samples, self.references = every, samples, references
        self.epochs, self.confidence = epochs, confidence

    def check(self, run: FederatedRun) -> None:
        """Check that there is a global model, and enough samples with classes as labels."""
        key = "callbacks: MembershipAudit"
        if not run.data.objective.classes:
            raise ConfigError(f"{key}: {run.data.objective.no_classes}. Leave it out.")
        if not run.algorithm.one_model:
            raise ConfigError(f"{key}: {type(run.algorithm).__name__} has no global model to attack. Leave it out.")
        if run.data.is_remote or not run.data.has_global_test or run.data.data.evaluate:
            raise ConfigError(f"{key}: it needs a global test set, and training samples on this machine. Leave it out.")
        canaries = canaries_of(run)
        if canaries is not None and len(canaries.rows) < FEWEST:
            fix = "Increase adversary.share or adversary.clients"
            raise ConfigError(f"{key}: there are too few canaries ({len(canaries.rows)}, below {FEWEST}). {fix}.")
        fewest = min(len(self._trained(run)), len(run.data.data.y_test))
        if fewest < 2 * FEWEST:
            fix = f"Use {2 * FEWEST} or more."
            raise ConfigError(f"{key}: there are too few training or test samples ({fewest}). {fix}")
        if self.references:
            run.worker.template.require_optimizer(f"{key}.references")

    def metrics(self, run: FederatedRun) -> Iterable[str]:
        """Return the names of the measures of each attack."""
        names = [f"audit/{attack}_{what}" for attack in self._attacks for what in ("auc", "advantage", "epsilon")]
        return names if canaries_of(run) is None else [*names, "audit/canary_accuracy", "audit/canary_epsilon"]

    @property
    def _attacks(self) -> list[str]:
        return ["loss", "lira"] if self.references else ["loss"]

    def on_round_metrics(self, run: FederatedRun, metrics: RoundMetrics) -> None:
        """Attack the new global model, if the round is audited."""
        if run.round != run.rounds and (self.every is None or run.round % self.every):
            return
        privacy = run.worker.training.dp_sgd
        options = (privacy.delta if privacy else 0.0, self.confidence)
        for attack, (members, others) in self.scores(run).items():
            found = audit_scores(members, others, *options)
            metrics |= {f"audit/{attack}_{what}": value for what, value in found._asdict().items()}
        if (canaries := canaries_of(run)) is not None:
            batches = [*run.worker.client_data.ordered_batches(canaries.rows)]
            scores = self._confidences(run, run.evaluator.global_module(run.round), batches)
            guessed = audit_canaries(scores, canaries.included.numpy(), *options)
            metrics |= {f"audit/canary_{what}": value for what, value in guessed._asdict().items()}

    def scores(self, run: FederatedRun) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return each attack's scores of the members and the non-members, in random order. Members score higher."""
        seed, round = run.worker.seed, run.round
        rng = generator(seed, Stream.PRIVACY, round, 0, 0)
        trained = self._trained(run)
        chosen = trained[torch.from_numpy(rng.permutation(len(trained))[: self.samples])]
        members = [*run.worker.client_data.ordered_batches(chosen)]
        order = torch.from_numpy(rng.permutation(len(run.data.data.y_test)))
        half = min(self.samples, len(order) // 2)
        groups = members, selected(run.worker.client_data.test_batches(), order[:half])
        target = [self._confidences(run, run.evaluator.global_module(round), group) for group in groups]
        scores = {"loss": (target[0], target[1])}
        if self.references:
            background = selected(run.worker.client_data.test_batches(), order[half : 2 * half])
            means = [np.zeros(len(scored)) for scored in target]
            for number in range(self.references):
                seed_everything(seed, Stream.PRIVACY, round, 0, 1 + number)
                module = self._reference(run, background, rng)
                for mean, group in zip(means, groups, strict=True):
                    mean += self._confidences(run, module, group) / self.references
            scores["lira"] = (target[0] - means[0], target[1] - means[1])
        shuffle = rng.permutation(half)
        return {attack: (members, others[shuffle]) for attack, (members, others) in scores.items()}

    @staticmethod
    def _trained(run: FederatedRun) -> Tensor:
        """Return the indices of all clients' training samples that are no canaries."""
        trained = torch.cat([shard.train for shard in run.data.shards])
        canaries = canaries_of(run)
        return trained if canaries is None else trained[~torch.isin(trained, canaries.rows)]

    def _reference(self, run: FederatedRun, background: Samples, rng: np.random.Generator) -> ClientModule:
        """Return a model with the run's initial weights, trained on a random half of the attacker's samples."""
        module = run.worker.modules.build().to(run.worker.device)
        module.context = module.context._replace(batch_size=run.worker.training.batch_size)
        size = sum(len(y) for _, y in background)
        own = selected(background, torch.from_numpy(rng.permutation(size)[: size // 2]))
        fine_tune(module, own, self.epochs)
        return module

    @staticmethod
    def _confidences(run: FederatedRun, module: ClientModule, batches: Samples) -> np.ndarray:
        """Return the log-odds that a model gives to the class of each sample, `(n,)`."""
        with inference(module, run.worker.idle_trainer):
            parts = [log_odds(module(x), y).cpu() for x, y in batches]
        return torch.cat(parts).double().numpy()


def canaries_of(run: FederatedRun) -> Canaries | None:
    """Return the run's canaries, or None if there are none."""
    return run.adversary if isinstance(run.adversary, Canaries) and run.adversary.attackers else None


def log_odds(logits: Tensor, classes: Tensor) -> Tensor:
    """Return `ln(p / (1 - p))` of the probability p of each sample's class, `(B,)` (Carlini et al. 2022, Eq. 3).

    It grows as the cross-entropy falls, and is closer to a normal distribution.

    Args:
        logits: The logits, `(B, C)`.
        classes: The classes, `(B,)`.
    """
    logits = at_least_float32(logits)
    own = logits.gather(1, classes[:, None])
    rest = logits.scatter(1, classes[:, None], -torch.inf)
    return own[:, 0] - rest.logsumexp(dim=1)


def selected(batches: Iterable[tuple[Any, Tensor]], index: Tensor) -> Samples:
    """Return the samples at some indices of all batches together, in ascending order, in batches.

    Args:
        batches: Batches of samples.
        index: The indices, `(n,)`.
    """
    found, start = [], 0
    index = index.sort().values
    for x, y in batches:
        inside = index[(index >= start) & (index < start + len(y))] - start
        if len(inside):
            found.append((x[inside.to(y.device)], y[inside.to(y.device)]))
        start += len(y)
    return found
