"""Handle clients that fail in a round: raise the error, or continue with the other clients."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Literal

from fl_lightning.core.errors import ClientFailure, TooFewClients
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


def warn_of_dropped_uploads(round: int, dropped: Mapping[int, str], data: FederatedData) -> None:
    """Warn of each upload that the server has not aggregated.

    Args:
        round: The round.
        dropped: The reasons by client id.
        data: The data, for the names of the clients.
    """
    for client, reason in dropped.items():
        failure = ClientFailure(client, round, f"its crafted upload is refused: {reason}")
        failure.label = data.names.client(client)
        warnings.warn(f"{failure}; dropped from this round", stacklevel=2)


def require_uploads(round: int, uploads: int, participants: int, min_clients: int) -> None:
    """Check that at least `min_clients` clients of a round sent an upload.

    Raises:
        TooFewClients: There are fewer uploads than `min_clients`.
    """
    if uploads < min_clients:
        left = f"{uploads} of {participants} clients were left"
        raise TooFewClients(f"round {round}: {left}, min_clients is {min_clients}")
