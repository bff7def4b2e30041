"""Pack whole numbers of few bits, and the positions of chosen entries, into bytes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.state_dicts import pack_mask, unpack_mask

PIECE = 1 << 15
"""Number of values that are packed at a time. A multiple of 8, so that each piece ends with a whole byte."""


def packed_bytes(count: int, width: int) -> int:
    """Return the number of bytes of `count` values with `width` bits each: `⌈count · width / 8⌉`."""
    return -(-count * width // 8)


def pack_bits(values: Tensor, width: int) -> Tensor:
    """Pack whole numbers into bytes, one after another, each with its highest bit first.

    Args:
        values: Whole numbers in [0, 2^width), int64 `(n,)`.
        width: Number of bits of each.

    Returns:
        uint8 `(⌈n · width / 8⌉,)`. The unused bits of the last byte are 0.

    Example:
        >>> pack_bits(torch.tensor([1, 2, 3]), 3)  # 001 010 011
        tensor([ 41, 128], dtype=torch.uint8)
    """
    shifts = np.arange(width - 1, -1, -1)
    pieces = (piece.numpy()[:, None] >> shifts & 1 for piece in values.split(PIECE))
    return torch.from_numpy(np.concatenate([np.packbits(piece.astype(np.uint8)) for piece in pieces]))


def unpack_bits(packed: Tensor, count: int, width: int) -> Tensor:
    """Return the whole numbers, int64 `(count,)`, that `pack_bits` has packed with `width` bits each."""
    weights = 1 << np.arange(width - 1, -1, -1)
    values = torch.empty(count, dtype=torch.int64)
    for piece, own in zip(values.split(PIECE), packed.split(packed_bytes(PIECE, width)), strict=True):
        bits = np.unpackbits(own.numpy(), count=len(piece) * width).reshape(-1, width)
        piece.copy_(torch.from_numpy(bits @ weights))
    return values


def index_width(size: int) -> int:
    """Return the number of bits of an index below `size`: `⌈log2 size⌉`, at least 1."""
    return max(1, (size - 1).bit_length())


def positions_are_mask(count: int, size: int) -> bool:
    """Return whether a mask of `size` bits takes fewer bits than a list of `count` indices below `size`."""
    return size < count * index_width(size)


def position_bytes(count: int, size: int) -> int:
    """Return the number of bytes in which the positions of `count` of `size` entries are sent."""
    return packed_bytes(size, 1) if positions_are_mask(count, size) else packed_bytes(count, index_width(size))


def pack_positions(indices: Tensor, size: int) -> Tensor:
    """Pack ascending indices below `size`: as a list with `index_width(size)` bits each, or as a mask if smaller."""
    if not positions_are_mask(len(indices), size):
        return pack_bits(indices, index_width(size))
    return pack_mask(torch.zeros(size, dtype=torch.bool).index_fill_(0, indices, True))


def unpack_positions(packed: Tensor, count: int, size: int) -> Tensor:
    """Return the ascending indices, int64 `(count,)`, that `pack_positions` has packed.

    Raises:
        ValueError: They are not ascending, not below `size`, or not `count`.
    """
    if positions_are_mask(count, size):
        indices = unpack_mask(packed, torch.Size([size])).nonzero().flatten()
    else:
        indices = unpack_bits(packed, count, index_width(size))
    if len(indices) != count or bool((indices.diff() <= 0).any()) or bool((indices[-1:] >= size).any()):
        raise ValueError(f"the positions are not {count} ascending indices below {size}")
    return indices
