"""Options of the local training on each client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable

from fl_lightning.core.errors import check_positive


@dataclass(frozen=True)
class LocalTraining:
    """Options of the clients' local training. In config files and on the command line these are top-level keys.

    Args:
        batch_size: Number of samples in a training batch.
        optimizer: Builds the optimizer of each client's fit. By default it is that of the model, if the model is a
            LightningModule, or SGD.
        optimizer_state: State of a client's optimizer at the start of a round: `fresh`, or `kept` from the client's
            last round (momentum, step counts, ...), with this round's learning rate. By default the algorithm decides;
            most start `fresh`.
        lr_scheduler: Builds a learning-rate scheduler within one client's fit. It is stepped once an epoch.
        trainer: Keyword arguments of Lightning's `Trainer` for each client's fit: `accelerator`, `precision`,
            `max_epochs` or `max_steps` (the local work, one epoch by default), `gradient_clip_val`, ...
        compile: Compile the network, once for all clients and rounds. This pays off if a step takes long.
        channels_last: Store images in channels-last memory format. By default on CUDA GPUs in half or mixed precision,
            if the network has convolutions, which are then usually faster.
        client_callbacks: Lightning callbacks, copied for each client's fit: `LearningRateMonitor`, `EarlyStopping` on
            `train_loss`, or your own. Values that they log become part of the round's metrics; `client/<name>` is the
            mean over the round's clients.

    Raises:
        ConfigError: `batch_size` is not a positive whole number.
    """

    batch_size: int = 64
    optimizer: OptimizerCallable | None = None
    optimizer_state: Literal["fresh", "kept"] | None = None
    lr_scheduler: LRSchedulerCallable | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    compile: bool = False
    channels_last: bool | None = None
    client_callbacks: list[Callback] | None = None

    def __post_init__(self) -> None:
        check_positive(batch_size=self.batch_size)
