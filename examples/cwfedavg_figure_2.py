"""Redraw cwFedAVG's Fig. 2: how the weight distribution regularizer changes a client's class estimates in a round.

A client of a Dirichlet 0.1 partition trains for an epoch, first without and then with the regularizer. After each step,
its class distribution is estimated from the row norms of the classification layer.

    python examples/cwfedavg_figure_2.py [--data FOLDER_OF_FASHION_MNIST] [--out cwfedavg_figure_2.png]
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.algorithms import CwFedAvg
from fl_lightning.algorithms.personalized.cwfedavg import class_shares, weight_distribution
from fl_lightning.callbacks.plots import lines, panels, write_png
from fl_lightning.client.loss_term import FitContext
from fl_lightning.data import Digits, Dirichlet, FashionMNIST, Scenario
from fl_lightning.models import CNN4, MLP, classification_layer


class Estimates(L.Callback):
    """Record the estimated class distribution before the first step and after each step."""

    def __init__(self) -> None:
        self.history: list[np.ndarray] = []

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self._record(module)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        self._record(module)

    def _record(self, module: Any) -> None:
        weight = classification_layer(module.backbone).weight.detach()
        self.history.append(weight_distribution(weight).numpy())


def main(data: str | None = None, out: str | None = None, lam: float = 10.0) -> dict[str, dict[str, float]]:
    """Print and draw the estimates. Return their gap and correlation, without and with the regularizer."""
    dataset = FashionMNIST(data_dir=data) if data else Digits()
    split = Scenario(dataset, Dirichlet(0.1, min_samples=20), clients=20).build(seed=0)
    counts = split.class_counts()
    client = int((counts > counts.sum(axis=1, keepdims=True) / 20).sum(axis=1).argmax())  # has the most classes
    index = split.shards[client].train
    x, y = split.data.prepare(split.data.x_train[index]), split.data.y_train[index]
    shares = class_shares(torch.from_numpy(counts[client])).numpy()
    figure, panel_axes = panels(3)
    results = {}
    for axes, (name, weight) in zip(panel_axes, {"without WDR": 0.0, "with WDR": lam}.items(), strict=False):
        L.seed_everything(0, verbose=False)
        shape, kind = tuple(x.shape[1:]), CNN4 if data else MLP
        optimizer = partial(torch.optim.SGD, lr=0.005)
        module = CwFedAvg(lam=weight).client_module(kind(in_shape=shape, num_classes=10), optimizer=optimizer)
        module.context = FitContext(class_counts=torch.from_numpy(counts[client]))
        estimates = Estimates()
        silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = L.Trainer(max_epochs=1 if data else 10, accelerator="cpu", callbacks=[estimates], **silent)
        trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True))
        history = np.stack(estimates.history)
        gap, correlation = np.linalg.norm(shares - history[-1]), np.corrcoef(shares, history[-1])[0, 1]
        results[name] = {"gap": float(gap), "correlation": float(correlation)}
        initial_gap = np.linalg.norm(shares - history[0])
        print(f"{name}: ||p - p~|| {initial_gap:.3f} -> {gap:.3f}, correlation {correlation:.3f}")
        steps = np.arange(len(history))
        lines(axes, {f"class {j}": (steps, history[:, j]) for j in range(10)}, "estimate", "step")
        axes.set_title(name, fontsize=9)
        axes.get_legend().remove()
        panel_axes[2].scatter(shares, history[-1], label=name)
    panel_axes[2].plot([0, shares.max()], [0, shares.max()], color="grey", linewidth=0.8)
    panel_axes[2].set(xlabel="true class share", ylabel="estimate")
    panel_axes[2].legend(fontsize=8)
    if out:
        write_png(figure, Path(out))
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="Folder of Fashion-MNIST. By default the 8x8 digits are used.")
    parser.add_argument("--out", default="cwfedavg_figure_2.png")
    parser.add_argument("--lam", type=float, default=10.0)
    main(**vars(parser.parse_args()))
