"""Cut a vector into buckets, which quantisers scale separately."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bucket_count(size: int, bucket: int | None) -> int:
    """Return the number of buckets of a vector: `⌈size / bucket⌉`, or 1 if `bucket` is None."""
    return 1 if bucket is None else -(-size // bucket)


def into_buckets(vector: Tensor, bucket: int | None) -> Tensor:
    """Cut a vector into rows of `bucket` entries. The last row is filled with zeros.

    Args:
        vector: The vector, `(P,)`.
        bucket: Number of entries of a row; the whole vector is one row if None.

    Returns:
        `(⌈P / bucket⌉, bucket)`.
    """
    width = len(vector) if bucket is None else bucket
    return F.pad(vector, (0, -len(vector) % width)).view(-1, width)
