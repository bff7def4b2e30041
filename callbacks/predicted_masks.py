"""Callback that draws test images with their true and predicted masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from fl_lightning.callbacks.figures import Arrays, RoundFigure, received_module
from fl_lightning.core.errors import ConfigError, check_positive
from fl_lightning.core.names import labels
from fl_lightning.engines.trainer import inference

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun

COLORS = colormaps["tab20"]
"""Colours of the classes, which are repeated from the 21st class on."""
UNUSED = (0.85, 0.85, 0.85)
"""Colour of pixels that are not used."""


class PredictedMasks(RoundFigure):
    """Draw one test image of each client with its mask, and with the mask that the model predicts.

    The model is the global one, or the client's personalised model if the method has no global model. The image is the
    first of the client's test split, as the network gets it, scaled to its smallest and largest value.

    Args:
        every: Rounds between measurements. By default only the last round.
        clients: Largest number of clients that are shown: the first ones that have test samples.

    Raises:
        ConfigError: The labels are not masks, no client has test samples, or `clients` is below 1.
    """

    name = "predicted_masks"

    def __init__(self, every: int | None = None, clients: int = 4) -> None:
        super().__init__(every)
        check_positive("callbacks: PredictedMasks.", clients=clients)
        self.clients = clients

    def check(self, run: FederatedRun) -> None:
        """Check that the labels are masks, and that there are test samples."""
        super().check(run)
        if run.data.data.y_test.ndim != 3:
            raise ConfigError("callbacks: PredictedMasks: it needs masks as labels. Leave it out.")
        if not self._shown(run):
            raise ConfigError("callbacks: PredictedMasks: no client has test samples. Increase scenario.local_test.")

    def _shown(self, run: FederatedRun) -> list[int]:
        return [client for client, shard in enumerate(run.data.shards) if len(shard.test)][: self.clients]

    def measure(self, run: FederatedRun) -> Arrays:
        """Return the `clients` `(K,)`, and their `images` `(K, channels, H, W)`, `masks` and `predictions` `(K, H, W)`.

        Pixels that are not used are -1 in `masks`.
        """
        shared = run.evaluator.global_module(run.round) if run.algorithm.one_model else None
        shown = self._shown(run)
        arrays: dict[str, list[Tensor]] = {"images": [], "masks": [], "predictions": []}
        for client in shown:
            module = shared or received_module(run, client)
            with inference(module, run.worker.idle_trainer):
                x, y = next(iter(run.worker.client_data.own_test_batches(client)))
                outputs = module(x[:1]).float()
            arrays["images"].append(x[0].float())
            arrays["masks"].append(y[0].long().where(y[0] < outputs.shape[1], -1))
            arrays["predictions"].append(outputs[0].argmax(dim=0))
        stacked = {name: torch.stack(values).cpu().numpy() for name, values in arrays.items()}
        return {"clients": np.array(shown), **stacked, "classes": np.array(run.data.data.num_classes)}

    def draw(self, arrays: Arrays) -> Figure:
        """Draw a row for each client: the image, its mask and the prediction."""
        rows, classes = len(arrays["clients"]), int(arrays["classes"])
        figure = Figure(figsize=(6.4, 2.1 * rows + 0.5), layout="constrained")
        places = figure.subplots(rows, 3, squeeze=False)
        for row, client in zip(range(rows), arrays["clients"], strict=True):
            masks = (colored(arrays[name][row]) for name in ("masks", "predictions"))
            for axes, pixels in zip(places[row], (gray_or_color(arrays["images"][row]), *masks), strict=True):
                axes.imshow(pixels, cmap="gray")
                axes.set(xticks=[], yticks=[])
            places[row][0].set_ylabel(self.names.client(int(client)), fontsize=9, parse_math=False)
        for axes, title in zip(places[0], ("image", "mask", "prediction"), strict=True):
            axes.set_title(title, fontsize=9)
        names = labels(self.names.classes, range(min(classes, COLORS.N)))
        patches = [Patch(color=COLORS(number), label=name) for number, name in enumerate(names)]
        figure.legend(handles=patches, loc="outside lower center", ncols=min(classes, 5), fontsize=8)
        return figure


def gray_or_color(image: np.ndarray) -> np.ndarray:
    """Return an image `(channels, H, W)` scaled to 0 to 1, as `(H, W, 3)`, or `(H, W)` if it has not three channels."""
    low, high = image.min(), image.max()
    scaled = (image - low) / max(float(high - low), 1e-12)
    return scaled.transpose(1, 2, 0) if len(image) == 3 else scaled[0]


def colored(mask: np.ndarray) -> np.ndarray:
    """Return the colours `(H, W, 3)` of a mask `(H, W)` of classes. Pixels that are not used are -1."""
    colors = COLORS(mask % COLORS.N)[..., :3]
    return np.where((mask < 0)[..., None], UNUSED, colors)
