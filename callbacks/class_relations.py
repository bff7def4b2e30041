"""Callback that compares how classes relate in a model's outputs and in its last layer's weights (FedDW, Fig. 8)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from fl_lightning.algorithms.global_model.feddw import class_relations, consistency_loss, soft_label_matrix
from fl_lightning.callbacks.figures import Arrays, RoundFigure
from fl_lightning.callbacks.plots import heat_maps
from fl_lightning.client.knowledge import class_sums_over
from fl_lightning.core.errors import ConfigError
from fl_lightning.engines.trainer import inference
from fl_lightning.models import classification_layer

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun
    from fl_lightning.evaluation.summary import Row


class ClassRelations(RoundFigure):
    """Draw the soft-label (SL) and the class-relation (CR) matrix of the global model (FedDW, Fig. 8).

    The global model is the one that is evaluated, after a calibration such as that of CCVR. SL is computed on the
    global test set for every method, so that runs can be compared. CR is shown after a softmax over rows. Logs
    `class_relations/distance`, the mean square of Eq. 11.

    Args:
        every: Rounds between measurements. By default only the last round.

    Raises:
        ConfigError: There is no shared model, or it does not end with a linear layer with a row of weights per class.
    """

    name = "class_relations"
    needs_classes = True
    needs_test_classes = True

    def check(self, run: FederatedRun) -> None:
        """Check that the method has a shared model, and that its last layer has one row of weights per class."""
        super().check(run)
        if not run.algorithm.one_model:
            method = type(run.algorithm).__name__
            raise ConfigError(f"callbacks: ClassRelations: {method} has no shared model. Leave it out.")
        with suppress(ConfigError):
            if len(classification_layer(run.worker.template.backbone).weight) == run.data.data.num_classes:
                return
        reason = "the model does not end with a linear layer with one row of weights per class"
        raise ConfigError(f"callbacks: ClassRelations: {reason}. Leave it out.")

    def metrics(self, run: FederatedRun) -> Iterable[str]:
        """Return the name of the metric that this callback logs."""
        return ["class_relations/distance"]

    def measure(self, run: FederatedRun) -> Arrays:
        """Return the shared model's soft-label matrix and class-relation matrix, `(C, C)`, and their distance."""
        module = run.evaluator.global_module(run.round)
        with inference(module, run.worker.idle_trainer):
            batches, classes = run.worker.client_data.test_batches(), run.data.data.num_classes
            sl = soft_label_matrix(*class_sums_over(batches, lambda x: module(x).float().softmax(dim=1), classes))
            weight = classification_layer(module.backbone).weight.float()
            cr, distance = class_relations(weight).softmax(dim=1), consistency_loss(sl, weight)
        found = {"sl": sl, "cr": cr, "distance": distance}
        return {name: value.float().cpu().numpy() for name, value in found.items()}  # NumPy has no bfloat16

    def numbers(self, arrays: Arrays) -> Row:
        """Return the distance between the soft-label and the class-relation matrix, as a metric of the round."""
        return {"class_relations/distance": float(arrays["distance"])}

    def draw(self, arrays: Arrays) -> Figure:
        """Draw the soft-label matrix and the class-relation matrix as heat maps."""
        titles = "global model: SL matrix", "global model: softmax of CR matrix"
        matrices, names = dict(zip(titles, (arrays["sl"], arrays["cr"]), strict=True)), self.names.classes
        return heat_maps(matrices, rows="class", row_names=names, column_names=names)
