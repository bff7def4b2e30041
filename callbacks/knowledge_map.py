"""Where a client's samples and its structural knowledge lie (FedSKC, Fig. 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from fl_lightning.callbacks.figures import Arrays, RoundFigure, trained_model
from matplotlib.figure import Figure

from fl_lightning.algorithms.global_model.fedskc import local_knowledge
from fl_lightning.errors import ConfigError
from fl_lightning.knowledge import class_sums_over
from fl_lightning.message import Tensors
from fl_lightning.report.figures import panels

if TYPE_CHECKING:
    from fl_lightning.engines import Result
    from fl_lightning.orchestrator import FederatedOrchestrator


class KnowledgeMap(RoundFigure):
    """FedSKC's Fig. 4: t-SNE of test samples' logits under a client's trained model, and of its structural knowledge.

    Works for any method: the knowledge is worked out anew from the model and the client's own data.

    Args:
        every: Rounds between measurements; by default only the last round has one.
        client: Whose model; in a round that it has no part in, the first participant's.
        samples: How many test samples are shown, 10 or more.

    Raises:
        ConfigError: `samples` is below 10, there is no such client, or clients' models as trained are not to be known.
    """

    name = "knowledge_map"
    needs_classes = True
    looks_at_clients = True

    def __init__(self, every: int | None = None, client: int = 0, samples: int = 500) -> None:
        super().__init__(every)
        if samples < 10:
            raise ConfigError(f"callbacks: KnowledgeMap.samples: {samples} is below 10")
        self.client, self.samples = client, samples
        self._chosen: tuple[int, Tensors] | None = None

    def check(self, run: FederatedOrchestrator) -> None:
        """Refuse a client that is not there.

        Raises:
            ConfigError: It is not.
        """
        super().check(run)
        if not 0 <= self.client < run.clients:
            there = f"clients are 0 to {run.clients - 1}"
            raise ConfigError(f"callbacks: KnowledgeMap.client: there is no client {self.client}; {there}")

    def on_client_end(self, run: FederatedOrchestrator, result: Result) -> None:
        """Keep the model of the client to show."""
        wanted = self._chosen is None or result.client == self.client
        if self.is_due(run, run.round + 1) and result.upload and wanted:
            self._chosen = result.client, trained_model(run, result)

    def measure(self, run: FederatedOrchestrator) -> Arrays:
        """`points` and `labels` of the samples, `knowledge` and its `classes`, in the plane; the `client`."""
        from sklearn.manifold import TSNE  # a second to import

        assert self._chosen is not None
        client, model = self._chosen
        self._chosen = None
        module = run.worker.shared_module(model)
        with run.worker.inference(module):
            seen = [(module(x).float().cpu(), y.cpu()) for x, y in run.worker.test_batches()]
            logits, labels = (torch.cat(part) for part in zip(*seen, strict=True))
            sums, counts = class_sums_over(run.worker.training_batches(client), module, run.data.data.num_classes)
        shown = np.linspace(0, len(labels) - 1, min(self.samples, len(labels))).astype(int)
        held = counts.cpu() > 0
        knowledge = local_knowledge(sums.cpu(), counts.cpu())[held]
        together = torch.cat([logits[shown], knowledge]).numpy()
        perplexity = min(30.0, (len(together) - 1) / 3)
        plane = TSNE(init="pca", perplexity=perplexity, random_state=0).fit_transform(together)
        return {
            "points": plane[: len(shown)],
            "labels": labels[shown].numpy(),
            "knowledge": plane[len(shown) :],
            "classes": held.nonzero()[:, 0].numpy(),
            "client": np.array(client),
        }

    def draw(self, arrays: Arrays) -> Figure:
        """Samples by class, the client's knowledge as large points."""
        figure, (axes,) = panels(1)
        (x, y), (at_x, at_y), labels = arrays["points"].T, arrays["knowledge"].T, arrays["labels"]
        axes.scatter(x, y, c=labels, s=8, cmap="tab10" if labels.max() < 10 else "hsv")
        axes.scatter(at_x, at_y, s=130, color="blue", edgecolors="white")
        for point, label in zip(arrays["knowledge"], arrays["classes"], strict=True):
            axes.annotate(str(label), point, color="white", ha="center", va="center", fontsize=7)
        axes.set(xticks=[], yticks=[])
        axes.set_title(f"test samples, and knowledge of client {arrays['client']}", fontsize=9)
        return figure
