"""Redraw UA-PDFL's Fig. 4: does a model's output for a constant input reveal its training classes?

Clients 1 and 2 have samples of classes 0 and 1, and client 3 of classes 2 and 3. Each trains its own MLP to an accuracy
of 90 % on held-out samples. The script computes the divergence of their unit representations. The paper reports
Div(1,2) = 0.02 and Div(1,3) = 0.61.

    python examples/ua_pdfl_figure_4.py [--data FOLDER_OF_FASHION_MNIST] [--out ua_pdfl_figure_4.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.algorithms.decentralized.ua_pdfl import jensen_shannon, symmetric_kl, unit_input, unit_representation
from fl_lightning.callbacks.plots import panels, write_png
from fl_lightning.data import Digits, FashionMNIST
from fl_lightning.models import MLP

CLASSES = {1: (0, 1), 2: (0, 1), 3: (2, 3)}


def train(x: Tensor, y: Tensor, seed: int, init: int) -> torch.nn.Module:
    """Train an MLP on 80 % of the samples until its accuracy on the rest is above 90 %."""
    torch.manual_seed(init)
    model = MLP(in_shape=tuple(x.shape[1:]), num_classes=10, hidden=(64,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(seed)
    cut = len(y) * 4 // 5
    for _ in range(50):
        for batch in torch.randperm(cut, generator=generator).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        if float((model(x[cut:]).argmax(dim=1) == y[cut:]).float().mean()) > 0.9:
            break
    return model.eval()


def representations(x: Tensor, y: Tensor, seed: int) -> dict[int, Tensor]:
    """Return the unit representation of each client for one seed. All clients start from the same weights."""
    generator = torch.Generator().manual_seed(seed)
    split: dict[int, Tensor] = {}
    for client, classes in CLASSES.items():
        members = torch.isin(y, torch.tensor(classes)).nonzero()[:, 0]
        members = members[torch.randperm(len(members), generator=generator)]
        split[client] = members[: len(members) // 2] if client != 2 else members[~torch.isin(members, split[1])]
    units = {}
    for client, samples in split.items():
        model = train(x[samples[:500]], y[samples[:500]], seed * 10 + client, init=seed)
        with torch.no_grad():
            units[client] = unit_representation(model(unit_input(x)))
    return units


def main(data: str | None = None, out: str | None = None, seeds: int = 10) -> dict[str, np.ndarray]:
    """Print and draw two kinds of divergence over several seeds. Return an array `(seeds, 2)` for each kind."""
    loaded = (FashionMNIST(data_dir=data) if data else Digits()).load()
    x, y = loaded.prepare(loaded.x_train), loaded.y_train
    kinds = {"Jensen-Shannon": jensen_shannon, "symmetric KL (Eq. 6 as printed)": symmetric_kl}
    unit_outputs = [representations(x, y, seed) for seed in range(seeds)]
    divergences = {}
    for name, kind in kinds.items():
        divergences[name] = np.array([[kind(units[1], units[2]), kind(units[1], units[3])] for units in unit_outputs])
    figure, panel_axes = panels(2)
    for axes, (name, values) in zip(panel_axes, divergences.items(), strict=True):
        ordered = int((values[:, 0] < values[:, 1]).sum())
        mean, std = values.mean(axis=0), values.std(axis=0)
        print(
            f"{name}: Div(1,2) {mean[0]:.3f} ± {std[0]:.3f}, Div(1,3) {mean[1]:.3f} ± {std[1]:.3f}; "
            f"Div(1,2) < Div(1,3) with {ordered} of {seeds} seeds"
        )
        axes.boxplot(values)
        axes.set_xticks([1, 2], ["Div(1,2)", "Div(1,3)"])
        axes.set_title(name, fontsize=9)
    if out:
        write_png(figure, Path(out))
    return divergences


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="Folder of Fashion-MNIST. By default the 8x8 digits are used.")
    parser.add_argument("--out", default="ua_pdfl_figure_4.png")
    main(**vars(parser.parse_args()))
