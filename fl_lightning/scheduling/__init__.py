"""Simulated time: how fast clients are, and which of their results a round waits for."""

from fl_lightning.scheduling.clock import ClientWork as ClientWork
from fl_lightning.scheduling.clock import Clock as Clock
from fl_lightning.scheduling.clock import DeviceClock as DeviceClock
from fl_lightning.scheduling.clock import DeviceTrace as DeviceTrace
from fl_lightning.scheduling.policies import Buffered as Buffered
from fl_lightning.scheduling.policies import Deadline as Deadline
from fl_lightning.scheduling.policies import Synchronous as Synchronous
from fl_lightning.scheduling.policies import Tiers as Tiers
from fl_lightning.scheduling.schedule import Dispatch as Dispatch
from fl_lightning.scheduling.schedule import RoundPlan as RoundPlan
from fl_lightning.scheduling.schedule import RoundPolicy as RoundPolicy
from fl_lightning.scheduling.schedule import Schedule as Schedule

__all__ = [
    "Buffered",
    "ClientWork",
    "Clock",
    "Deadline",
    "DeviceClock",
    "DeviceTrace",
    "RoundPolicy",
    "Synchronous",
    "Tiers",
]
