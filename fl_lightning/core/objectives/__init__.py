"""Losses and metrics for each type of labels: one class, several 0/1 labels, numbers, a mask, or a class per token."""

from torch import Tensor

from fl_lightning.core.objectives.base import ClassWeights as ClassWeights
from fl_lightning.core.objectives.base import Objective
from fl_lightning.core.objectives.base import describe_tensor as describe_tensor
from fl_lightning.core.objectives.classification import Classification, MultiLabel
from fl_lightning.core.objectives.regression import Regression
from fl_lightning.core.objectives.segmentation import IGNORED as IGNORED
from fl_lightning.core.objectives.segmentation import Segmentation
from fl_lightning.core.objectives.tokens import IGNORED_TOKEN as IGNORED_TOKEN
from fl_lightning.core.objectives.tokens import CausalLM, TokenClassification

__all__ = ["CausalLM", "Classification", "MultiLabel", "Objective", "Regression", "Segmentation", "TokenClassification"]


def objective_of(labels: Tensor) -> Objective:
    """Return the default objective for labels.

    It is regression for floating-point labels, segmentation for whole numbers `(n, height, width)`, multi-label for
    `(n, L)`, and else classification.
    """
    if labels.is_floating_point():
        return Regression()
    if labels.ndim > 2:
        return Segmentation()  # which refuses other shapes
    return MultiLabel() if labels.ndim == 2 else Classification()
