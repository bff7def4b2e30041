"""Handle clients that fail in a round: raise the error, or continue with the other clients."""

from __future__ import annotations

import warnings
from typing import Literal

from fl_lightning.core.errors import TooFewClients
from fl_lightning.core.task import Result
from fl_lightning.data.federated_data import FederatedData


def accept_result(result: Result, on_client_failure: Literal["raise", "drop"], data: FederatedData) -> bool:
    """Return whether a client succeeded. If it failed, drop it with a warning or raise its error.

    Args:
        result: The client's result.
        on_client_failure: What to do if the client failed.
        data: The data, for the message: the names of the clients and the labels.

    Raises:
        ClientFailure: The client failed and `on_client_failure` is `raise`.
    """
    if not result.failure:
        return True
    result.failure.label = data.names.client(result.client)
    hint = data.objective.divergence_hint(data.data.y_train) if result.failure.diverged else ""
    result.failure.reason = ". ".join(filter(None, (result.failure.reason, hint)))
    if on_client_failure == "raise":
        raise result.failure
    warnings.warn(f"{result.failure}; dropped from this round", stacklevel=2)
    return False


def require_uploads(round: int, uploads: int, participants: int, min_clients: int) -> None:
    """Check that at least `min_clients` clients of a round sent an upload.

    Raises:
        TooFewClients: There are fewer uploads than `min_clients`.
    """
    if uploads < min_clients:
        left = f"{uploads} of {participants} clients were left"
        raise TooFewClients(f"round {round}: {left}, min_clients is {min_clients}")
