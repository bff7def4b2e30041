"""What watches a run, round by round."""

from fl_lightning.callbacks.base import RoundCallback
from fl_lightning.callbacks.checkpointing import Checkpointing
from fl_lightning.callbacks.communication import CommunicationMeter
from fl_lightning.callbacks.early_stopping import EarlyStopping
from fl_lightning.callbacks.progress import RoundProgress

__all__ = ["Checkpointing", "CommunicationMeter", "EarlyStopping", "RoundCallback", "RoundProgress"]
