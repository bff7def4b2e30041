"""Allowlist of the objects that an untrusted config may import."""

from __future__ import annotations

from functools import cache
from typing import Any

from fl_lightning.cli.catalogue import BASES, base
from fl_lightning.client.exported import allowed_objects as allowed_in_checkpoints
from fl_lightning.core.trusted_imports import by_import_path, public_classes

CLIENT_CALLBACKS = ("EarlyStopping", "LearningRateMonitor", "DeviceStatsMonitor", "Timer", "EMAWeightAveraging")
"""Lightning's callbacks that any config may name. They take only numbers and names, and do not touch files."""


@cache
def allowed_objects() -> dict[str, Any]:
    """Return all objects that an untrusted config may import, by import path."""
    from lightning.pytorch import callbacks
    from lightning.pytorch.loggers import Logger
    from torch import optim

    from fl_lightning.data.remote import DataDescription
    from fl_lightning.models import Mixed

    kinds = (*map(base, BASES), Mixed)
    places: list[tuple[str, tuple[type, ...]]] = [
        ("fl_lightning", (*kinds, Logger)),
        *((f"fl_lightning.{home}", kinds) for _, home, _ in BASES.values()),
        ("torch.optim", (optim.Optimizer,)),
        ("torch.optim.lr_scheduler", (optim.lr_scheduler.LRScheduler,)),
    ]
    allowed = dict(allowed_in_checkpoints())
    for place, bases in places:
        allowed |= public_classes(place, bases)
    return allowed | by_import_path([DataDescription, *(getattr(callbacks, name) for name in CLIENT_CALLBACKS)])
