"""Federated learning with non-IID clients on PyTorch Lightning."""

import gc

_collecting = gc.isenabled()
gc.disable()  # importing torch and lightning leaves no garbage, and looking for some takes a quarter of the time
try:
    from fl_lightning.algorithms import Aggregator, Algorithm, FedAvg, FedSKC
    from fl_lightning.client import ClientModule, LossTerm, Step
    from fl_lightning.data import Scenario
    from fl_lightning.knowledge import SharedKnowledge
    from fl_lightning.message import Message, Upload
    from fl_lightning.orchestrator import FederatedOrchestrator
finally:
    if _collecting:
        gc.enable()

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
]
