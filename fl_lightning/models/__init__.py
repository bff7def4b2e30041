"""Backbones: networks with an `encoder` for the features and a `head` for the logits. One file per family."""

from fl_lightning.models.adapted import Adapted, Adapter, LoRA
from fl_lightning.models.base import (
    Backbone,
    ModelFactory,
    NetworkFactory,
    classification_layer,
    frozen_encoder,
    with_encoder,
)
from fl_lightning.models.cnn import CNN, CNN4, LeNet
from fl_lightning.models.heads import CosineLinear, Head
from fl_lightning.models.language import CausalTransformer
from fl_lightning.models.mixed import Mixed, ResizedFeatures
from fl_lightning.models.mlp import MLP
from fl_lightning.models.mobile import MobileNetV2, ShuffleNetV2
from fl_lightning.models.pretrained import Pretrained
from fl_lightning.models.resnet import ResNet8, ResNet18, ResNet50
from fl_lightning.models.text import BiLSTM, FastText, TextCNN
from fl_lightning.models.unet import UNet
from fl_lightning.models.vgg import VGG11
from fl_lightning.models.wrapped import FromModule

__all__ = [
    "CNN",
    "CNN4",
    "MLP",
    "VGG11",
    "Adapted",
    "Adapter",
    "Backbone",
    "BiLSTM",
    "CausalTransformer",
    "CosineLinear",
    "FastText",
    "FromModule",
    "Head",
    "LeNet",
    "LoRA",
    "Mixed",
    "MobileNetV2",
    "ModelFactory",
    "NetworkFactory",
    "Pretrained",
    "ResNet8",
    "ResNet18",
    "ResNet50",
    "ResizedFeatures",
    "ShuffleNetV2",
    "TextCNN",
    "UNet",
    "classification_layer",
    "frozen_encoder",
    "with_encoder",
]
