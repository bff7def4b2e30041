"""Full precision within mixed-precision training, for loss terms that half precision would make inaccurate."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def widened_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values of a floating-point type are computed and sent: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def at_least_float32(value: Tensor) -> Tensor:
    """Return a tensor with half precision widened to float32; float32 and float64 stay as they are."""
    return value.to(widened_type(value.dtype))


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast on a device, in which operations keep the precision of their inputs.

    It does nothing if autocast is off anyway, because entering `torch.autocast` in each training step takes time.
    """
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
