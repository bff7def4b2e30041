"""Backbones: an `encoder` that gives features and a `head` that gives logits, one family a file."""

from fl_lightning.models.base import Backbone, ModelFactory
from fl_lightning.models.cnn import CNN
from fl_lightning.models.mlp import MLP
from fl_lightning.models.resnet import ResNet8

__all__ = ["CNN", "MLP", "Backbone", "ModelFactory", "ResNet8"]
