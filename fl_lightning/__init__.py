"""Federated learning with non-IID clients on PyTorch Lightning."""

from typing import TYPE_CHECKING, Any

from fl_lightning.lazy import load

if TYPE_CHECKING:
    from fl_lightning import runs
    from fl_lightning.algorithms import Aggregator, Algorithm, FedAvg, FedSKC
    from fl_lightning.client import ClientModule, LossTerm, Step
    from fl_lightning.data import Scenario
    from fl_lightning.experiment import open_run
    from fl_lightning.knowledge import SharedKnowledge
    from fl_lightning.message import Message, Upload
    from fl_lightning.orchestrator import FederatedOrchestrator

__version__ = "0.1.0"

__all__ = [
    "Aggregator",
    "Algorithm",
    "ClientModule",
    "FedAvg",
    "FedSKC",
    "FederatedOrchestrator",
    "LossTerm",
    "Message",
    "Scenario",
    "SharedKnowledge",
    "Step",
    "Upload",
    "open_run",
    "runs",
]

_HOMES = {
    "algorithms": ("Aggregator", "Algorithm", "FedAvg", "FedSKC"),
    "client": ("ClientModule", "LossTerm", "Step"),
    "data": ("Scenario",),
    "experiment": ("open_run",),
    "knowledge": ("SharedKnowledge",),
    "message": ("Message", "Upload"),
    "orchestrator": ("FederatedOrchestrator",),
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used."""
    if name == "runs":
        return load(f"{__name__}.runs")
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(load(f"{__name__}.{home}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
