"""Scaled signs with error feedback: EF-signSGD.

Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019
(arXiv:1901.09847), Algorithm 1: `C(p) = (‖p‖₁ / d) sign(p)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.compression.base import Compressor, Form
from fl_lightning.compression.bits import packed_bytes
from fl_lightning.compression.buckets import bucket_count, into_buckets
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import MOST
from fl_lightning.core.flat_tensors import Tensors
from fl_lightning.core.precision import widened_type
from fl_lightning.core.state_dicts import pack_mask, unpack_mask


class SignSGD(Compressor):
    """Send the sign of each entry, and the mean magnitude of each bucket of entries.

    Args:
        bucket: Number of entries with a mean magnitude of their own, `d`. null: one for the whole update.
        feedback: Add what was not sent to the client's next update. Without it, the method may not converge.

    Raises:
        ConfigError: `bucket` is below 1.
    """

    bucket: int | None = number(512, f"[1, {MOST}]")
    feedback: bool = True

    def form(self, size: int, dtype: torch.dtype) -> Form:
        """Return the form of the mean magnitudes of all buckets and one bit for each entry."""
        signs = (torch.uint8, packed_bytes(size, 1))
        return {"scales": (widened_type(dtype), bucket_count(size, self.bucket)), "signs": signs}

    def encode(self, vector: Tensor, dtype: torch.dtype, seed: int) -> Tensors:
        """Return the mean magnitudes, and a bit that is 1 for each entry that is not negative."""
        rows = into_buckets(vector.abs(), self.bucket)
        counts = into_buckets(torch.ones_like(vector), self.bucket).sum(dim=1)
        return {"scales": (rows.sum(dim=1) / counts).to(widened_type(dtype)), "signs": pack_mask(vector >= 0)}

    def decode(self, sent: Tensors, size: int, seed: int) -> Tensor:
        """Return plus or minus the mean magnitude of each entry's bucket."""
        signs = unpack_mask(sent["signs"], torch.Size([size])).double() * 2 - 1
        return (into_buckets(signs, self.bucket) * sent["scales"].double()[:, None]).flatten()[:size]
