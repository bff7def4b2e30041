"""Callback that draws a t-SNE map of test samples and of a client's class means (FedSKC, Fig. 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

from fl_lightning.algorithms.global_model.fedskc.knowledge import local_knowledge
from fl_lightning.callbacks.figures import Arrays, RoundFigure, trained_model
from fl_lightning.callbacks.plots import panels
from fl_lightning.client.knowledge import class_sums_over
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Tensors
from fl_lightning.core.names import labels, shorten_name
from fl_lightning.engines.trainer import inference
from fl_lightning.runs.paper_figure import TICK_LETTERS

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun
    from fl_lightning.engines import Result


MOST_IN_LEGEND = 20
"""Largest number of classes in a legend; more classes have a colour scale."""
DIAMOND = 7.5
"""Side of the diamond that marks a class mean, in points."""
MOST_LABELS = 120
"""Largest number of classes whose diamonds are labelled."""


class KnowledgeMap(RoundFigure):
    """Draw a t-SNE map of a client's test logits and of its class-wise mean logits (FedSKC, Fig. 4).

    Works with any method: the knowledge is computed from the model and the client's own data.

    Args:
        every: Rounds between measurements. By default only the last round.
        client: Id of the client. If it does not take part in the round, the first participant is shown.
        samples: Number of test samples that are shown, 10 or more.

    Raises:
        ConfigError: `samples` is below 10, the client does not exist, or the method does not reveal the
            clients' trained models.
    """

    name = "knowledge_map"
    needs_classes = True
    needs_test_classes = True
    looks_at_clients = True

    def __init__(self, every: int | None = None, client: int = 0, samples: int = 500) -> None:
        super().__init__(every)
        if samples < 10:
            raise ConfigError(f"callbacks: KnowledgeMap.samples: {samples} is below 10")
        self.client, self.samples = client, samples
        self._chosen: tuple[int, Tensors] | None = None

    def check(self, run: FederatedRun) -> None:
        """Check that the client whose model is shown exists."""
        super().check(run)
        if not 0 <= self.client < run.clients:
            fix = f"Clients are 0 to {run.clients - 1}"
            raise ConfigError(f"callbacks: KnowledgeMap.client: no client {self.client}. {fix}")

    def observe(self, run: FederatedRun, result: Result) -> None:
        """Store the trained model of the chosen client or, if it does not participate, of the first participant."""
        if self._chosen is None or result.client == self.client:
            self._chosen = result.client, trained_model(run, result)

    def measure(self, run: FederatedRun) -> Arrays:
        """Return the t-SNE positions and classes of test samples and of class means, and the client's id."""
        from sklearn.manifold import TSNE  # importing it takes a second

        assert self._chosen is not None
        client, model = self._chosen
        self._chosen = None
        worker = run.worker.for_client(client)
        module, data = worker.modules.build_shared(model), worker.client_data
        with inference(module, worker.idle_trainer):
            seen = [(module(x).float().cpu(), y.cpu()) for x, y in data.test_batches()]
            logits, labels = (torch.cat(part) for part in zip(*seen, strict=True))
            sums, counts = class_sums_over(data.training_batches(client), module, run.data.data.num_classes)
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
        """Draw test samples as points in their class's colour, and the client's mean logits per class as diamonds."""
        targets, held = arrays["labels"], arrays["classes"]
        classes = int(max(targets.max(), held.max(initial=0))) + 1
        named = classes <= MOST_IN_LEGEND
        colors = colormaps["tab10" if classes <= 10 else "tab20" if named else "turbo"]
        scale: dict[str, Any] = {"cmap": colors, "vmin": 0, "vmax": colors.N - 1 if named else classes - 1}
        figure, (axes,) = panels(1)
        side = min(4.2 + 0.05 * max(0, len(held) - 10), 9.0)
        figure.set_size_inches(side + 1.5, side + 0.6)
        (x, y), (at_x, at_y) = arrays["points"].T, arrays["knowledge"].T
        shown = axes.scatter(x, y, c=targets, s=8, **scale)
        axes.scatter(at_x, at_y, c=held, s=DIAMOND**2, marker="D", edgecolors="black", zorder=4, **scale)
        axes.set(xticks=[], yticks=[])
        self._describe_marks(figure, axes, self.names.client(int(arrays["client"])))
        if named:
            self._add_class_legend(figure, colors, np.union1d(targets, held).tolist())
        else:
            figure.colorbar(shown, ax=axes, label="class")
        if len(held) <= MOST_LABELS:
            place_labels(axes, arrays["knowledge"], self._class_names(held))
        return figure

    def _describe_marks(self, figure: Figure, axes: Axes, client: str) -> None:
        """Write the title of a client's map, and the legend of its points and diamonds."""
        title = f"trained model of {client}:\nlogits of test samples, and structural knowledge"
        axes.set_title(title, fontsize=9, parse_math=False)
        owner = f"knowledge of {client}, by class"
        kinds = [
            Line2D([], [], color="grey", marker=".", linestyle="", label="test sample"),
            Line2D([], [], color="grey", marker="D", markeredgecolor="black", linestyle="", label=owner),
        ]
        legend = figure.legend(handles=kinds, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        legend.get_texts()[1].set_parse_math(False)

    def _add_class_legend(self, figure: Figure, colors: Colormap, classes: Sequence[int]) -> None:
        """Add a legend of the colours of the classes."""
        points = [Line2D([], [], color=colors(j), marker="o", linestyle="", label=str(j)) for j in classes]
        legend = figure.legend(handles=points, loc="outside right upper", title="class", fontsize=8, frameon=False)
        for text, name in zip(legend.get_texts(), self._class_names(classes), strict=True):
            text.set(text=name, parse_math=False)  # labels of handles may not begin with _

    def _class_names(self, classes: Iterable[int]) -> list[str]:
        """Return the names of classes, shortened."""
        return [shorten_name(name, TICK_LETTERS) for name in labels(self.names.classes, classes)]


def place_labels(axes: Axes, points: np.ndarray, texts: Sequence[str]) -> None:
    """Write a text near each point, without overlaps, with a line to the point.

    Fixes the layout and the size of the figure.

    Args:
        axes: The axes with the points.
        points: `(n, 2)`, in data coordinates.
        texts: A text per point.
    """
    figure = axes.get_figure(root=True)
    assert figure
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    notes = [axes.annotate(text, (0, 0), xycoords="figure pixels", fontsize=7, parse_math=False) for text in texts]
    sizes = np.array([(box.width, box.height) for box in (note.get_window_extent() for note in notes)]).reshape(-1, 2)
    inside, marker = axes.get_window_extent(), DIAMOND * 2**0.5 * figure.dpi / 72
    at = axes.transData.transform(points) if len(points) else points
    taken = [Bbox.from_bounds(x - marker / 2, y - marker / 2, marker, marker) for x, y in at]
    for note, size, point in zip(notes, sizes + 2, at, strict=True):
        note.remove()
        for place in places_around(point, marker):
            box = Bbox.from_bounds(*(place - size / 2), *size)
            within = inside.x0 < box.x0 and box.x1 < inside.x1 and inside.y0 < box.y0 and box.y1 < inside.y1
            if within and not box.count_overlaps(taken):
                taken.append(box)
                break
        spot, own = axes.transData.inverted().transform([place, point])
        line = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0}
        halo = [withStroke(linewidth=1.5, foreground="white")]
        style: dict[str, Any] = {"fontsize": 7, "ha": "center", "va": "center", "zorder": 3, "path_effects": halo}
        axes.annotate(note.get_text(), own, xytext=spot, arrowprops=line, parse_math=False, **style)


def places_around(point: np.ndarray, step: float) -> Iterator[np.ndarray]:
    """Yield positions for a label around a point, on twenty circles with radii `step`, `2 * step`, ...."""
    for ring in range(1, 21):
        for angle in np.linspace(np.pi / 4, 9 * np.pi / 4, 8 * ring, endpoint=False):
            yield point + step * ring * np.array([np.cos(angle), np.sin(angle)])
