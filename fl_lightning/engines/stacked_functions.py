"""Replacements for torch functions inside `torch.vmap`, which give each client the results of training alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fl_lightning.core.seeding import RandomStates


class ClientFunctions(TorchFunctionMode):
    """Replaces dropout and other functions inside `torch.vmap`, so that each client gets the results of training alone.

    Dropout, `torch.rand` and `torch.randn` draw from the client's own random state. Embeddings keep the padding vector
    out of the gradient of every client. torch's batching rule does so for the first client only (seen in torch 2.15).

    Args:
        random_states: The clients' random states.

    Attributes:
        used: Whether a function was replaced.
    """

    place: Tensor  # of the client in `random_states`, batched

    def __init__(self, random_states: Sequence[RandomStates]) -> None:
        super().__init__()
        self.random_states, self.used = random_states, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function or its replacement."""
        if func is F.dropout:
            return self.dropout(*args, **(kwargs or {}))
        if func in (torch.rand, torch.randn) and not (kwargs or {}).get("generator"):
            return self.draw_by_client(functools.partial(func, *args, **(kwargs or {})))
        if func is F.embedding:
            return self.embedding(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Replacement for `F.dropout` that draws each client's mask from the client's own random state."""
        if not training or p in (0.0, 1.0):
            return F.dropout(input, p, training, inplace)

        def draw_mask() -> Tensor:  # inside `torch.vmap`, `input.shape` is that of one client's input
            return torch.empty(input.shape, dtype=input.dtype, device=input.device).bernoulli_(1 - p).div_(1 - p)

        mask = self.draw_by_client(draw_mask)
        return input.mul_(mask) if inplace else input * mask

    def draw_by_client(self, draw: Callable[[], Tensor]) -> Tensor:
        """Return the random numbers that the function `draw` draws from the current client's own random state.

        Inside `torch.vmap`, `draw` is called for every client, and the result of the current client is selected.
        """
        self.used = True
        outside, drawn = RandomStates(self.place.device), []
        for random_states in self.random_states:
            with random_states.drawing_torch():
                drawn.append(draw())
        with outside.drawing_torch():
            return torch.stack(drawn).index_select(0, self.place.reshape(1).to(drawn[0].device)).squeeze(0)

    def embedding(self, input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kw: Any) -> Tensor:
        """Replacement for `F.embedding` that keeps the padding vector out of every client's gradient."""
        vectors = F.embedding(input, weight, None, *args, **kw)
        if padding_idx is None:
            return vectors
        self.used = True
        padded = (input == padding_idx % len(weight)).unsqueeze(-1)
        return torch.where(padded, vectors.detach(), vectors)
