"""Decide what happens when clients of a round fail: raise, or continue with the others."""

from __future__ import annotations

import warnings
from typing import Literal

from fl_lightning.core.errors import TooFewClients
from fl_lightning.core.task import Result


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
