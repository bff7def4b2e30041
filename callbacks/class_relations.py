"""Whether a model's classification layer says of the classes what its outputs say (FedDW, Fig. 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_lightning.callbacks.figures import Arrays, RoundFigure
from matplotlib.figure import Figure

from fl_lightning.algorithms.global_model.feddw import class_relations, consistency_loss, soft_label_matrix
from fl_lightning.knowledge import class_sums_over
from fl_lightning.models import classification_layer
from fl_lightning.report.figures import heat_maps

if TYPE_CHECKING:
    from fl_lightning.metrics import Row
    from fl_lightning.orchestrator import FederatedOrchestrator


class ClassRelations(RoundFigure):
    """FedDW's Fig. 8: the shared model's SL matrix beside the row softmax of its CR matrix, and their distance.

    SL is taken over the global test set, whatever the method, so that runs can be compared. Logs
    `class_relations/distance`, Eq. 11's mean square.

    Args:
        every: Rounds between measurements; by default only the last round has one.
    """

    name = "class_relations"

    def measure(self, run: FederatedOrchestrator) -> Arrays:
        """`sl`, `cr` `(C, C)` and their `distance`."""
        module = run.worker.shared_module(run.state["model"])
        with run.worker.inference(module):
            batches, classes = run.worker.test_batches(), run.data.data.num_classes
            sl = soft_label_matrix(*class_sums_over(batches, lambda x: module(x).float().softmax(dim=1), classes))
            weight = classification_layer(module.backbone).weight.float()
            cr, distance = class_relations(weight).softmax(dim=1), consistency_loss(sl, weight)
        return {"sl": sl.cpu().numpy(), "cr": cr.cpu().numpy(), "distance": distance.cpu().numpy()}

    def numbers(self, arrays: Arrays) -> Row:
        """The distance."""
        return {"class_relations/distance": float(arrays["distance"])}

    def draw(self, arrays: Arrays) -> Figure:
        """Both matrices."""
        return heat_maps({"SL matrix": arrays["sl"], "softmax of the CR matrix": arrays["cr"]}, rows="class")
