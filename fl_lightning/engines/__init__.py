"""Engines, which run the clients' fits of a round. They differ in speed; their results differ only by rounding."""

from fl_lightning.core.task import Result, Task, Tasks
from fl_lightning.engines.auto import AutoEngine, EngineName, engine_of
from fl_lightning.engines.base import Engine
from fl_lightning.engines.flower import FlowerEngine
from fl_lightning.engines.processes import ProcessesEngine
from fl_lightning.engines.ray import RayEngine
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.engines.stacked import StackedEngine
from fl_lightning.engines.worker import Worker

__all__ = [
    "AutoEngine",
    "Engine",
    "EngineName",
    "FlowerEngine",
    "ProcessesEngine",
    "RayEngine",
    "Result",
    "SequentialEngine",
    "StackedEngine",
    "Task",
    "Tasks",
    "Worker",
    "engine_of",
]
