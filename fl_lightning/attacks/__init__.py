"""Adversaries: clients that send crafted updates or train on poisoned data. The config key is `adversary`."""

from fl_lightning.attacks.base import Adversary
from fl_lightning.attacks.canaries import Canaries
from fl_lightning.attacks.poisoning import Backdoor, LabelFlip
from fl_lightning.attacks.updates import ALIE, IPM, GaussianNoise, MinMax, MinSum, ModelReplacement, SignFlip

__all__ = [
    "ALIE",
    "IPM",
    "Adversary",
    "Backdoor",
    "Canaries",
    "GaussianNoise",
    "LabelFlip",
    "MinMax",
    "MinSum",
    "ModelReplacement",
    "SignFlip",
]
