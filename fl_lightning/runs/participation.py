"""Number of clients in a round, and treatment of clients that fail."""

from __future__ import annotations

import warnings
from typing import Literal

from fl_lightning.core.errors import ConfigError, TooFewClients
from fl_lightning.core.task import Result


def participants_per_round(wanted: int | None, clients: int, min_clients: int) -> int:
    """Return the number of clients that train in each round: `wanted`, or all clients if it is None.

    Raises:
        ConfigError: The number is not between 1 and `clients`, or is below `min_clients`.
    """
    per_round = clients if wanted is None else wanted
    if not 1 <= per_round <= clients:
        raise ConfigError(f"clients_per_round: {per_round} is not between 1 and scenario.clients, {clients}")
    if min_clients > per_round:
        raise ConfigError(f"min_clients: {min_clients} is above the {per_round} clients of a round")
    return per_round


def has_upload(result: Result, on_client_failure: Literal["raise", "drop"]) -> bool:
    """Return whether a client's result has an upload to aggregate. Warn if a failed client is dropped.

    Raises:
        ClientFailure: The client failed and `on_client_failure` is `raise`.
    """
    if not result.failure:
        return True
    if on_client_failure == "raise":
        raise result.failure
    warnings.warn(f"{result.failure}; dropped from this round", stacklevel=2)
    return False


def require_uploads(round: int, uploads: int, participants: int, min_clients: int) -> None:
    """Check that at least `min_clients` clients of a round have an upload.

    Raises:
        TooFewClients: There are fewer uploads than `min_clients`.
    """
    if uploads < min_clients:
        left = f"{uploads} of {participants} clients were left"
        raise TooFewClients(f"round {round}: {left}, min_clients is {min_clients}")
