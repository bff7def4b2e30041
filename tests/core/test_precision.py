"""Full precision within autocast."""

import pytest
import torch

from fl_lightning.core.precision import at_least_float32, without_autocast

CPU = torch.device("cpu")


def test_without_autocast_products_keep_their_precision_and_autocast_goes_on_afterwards():
    a = torch.full((2, 2), 1 + 2**-12)
    with torch.autocast("cpu", torch.bfloat16):
        with without_autocast(CPU):
            inside = a @ a
        after = a @ a
    assert torch.equal(inside, a @ a)
    assert inside.dtype == torch.float32
    assert after.dtype == torch.bfloat16


def test_if_autocast_is_off_no_context_is_entered(monkeypatch):
    monkeypatch.setattr(torch.autocast, "__enter__", lambda self: pytest.fail("entered"))
    with without_autocast(CPU):
        pass


@pytest.mark.parametrize(
    ("dtype", "widened"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_only_half_precision_is_widened(dtype, widened):
    assert at_least_float32(torch.zeros(1, dtype=dtype)).dtype == widened
