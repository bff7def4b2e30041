"""A causal language model. Inputs are token ids `(B, length)`, with padding only after the text."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.core.errors import ConfigError, check_number, check_positive
from fl_lightning.core.inputs import Shapes
from fl_lightning.models.base import Backbone
from fl_lightning.models.wrapped import accept_inputs

INITIAL_STD = 0.02
"""Standard deviation of the initial embeddings, as in GPT-2."""


class CausalTransformer(Backbone):
    """Transformer that predicts each next token from those before it, as GPT-2 in small.

    The features are vectors of the tokens, `(B, length, width)`, and the head is a linear layer. Normalization comes
    before attention and before the MLP of each layer. Outputs at a token do not depend on what follows, so padding
    after a text needs no mask.

    Source: Radford et al.: "Language Models are Unsupervised Multitask Learners", 2019, without tied embeddings.

    Args:
        in_shape: `(length,)` token ids, or the shapes of `input_ids` and `attention_mask`.
        num_classes: Number of token ids.
        width: Size of a token's vector, a multiple of `heads`.
        depth: Number of layers.
        heads: Number of attention heads.
        dropout: Probability of dropping a value in training, below 1.

    Raises:
        ConfigError: A number is out of its range.
        ValueError: The input is not a text.
    """

    several_inputs: ClassVar = True

    def __init__(
        self,
        in_shape: tuple[int, ...] | Shapes,
        num_classes: int,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        check_positive("model.", width=width, depth=depth, heads=heads)
        check_number("model.dropout", dropout, "[0, 1)")
        if width % heads:
            raise ConfigError(f"model.width: {width} is not a multiple of model.heads ({heads}). Change one of them")
        encoder = TransformerEncoder(text_length(in_shape), num_classes, width, depth, heads, dropout)
        accept_inputs(encoder, in_shape)
        super().__init__(encoder, nn.Linear(width, num_classes, bias=False), width)


def text_length(in_shape: Any) -> int:
    """Return the number of tokens of a text, given the shape of its token ids, alone or as `input_ids`.

    Raises:
        ValueError: The shape is not that of a text.
    """
    shape = in_shape.get("input_ids", ()) if isinstance(in_shape, dict) else in_shape
    if len(shape) != 1 or not isinstance(shape[0], int):
        fix = "use a text dataset such as TextFile or InstructionFile"
        raise ValueError(f"model: this network reads token ids (length,), the dataset has {in_shape}; {fix}")
    return shape[0]


class TransformerEncoder(nn.Module):
    """Embeddings of tokens and of their positions, and layers of causal attention: ids to vectors.

    Args:
        length: Largest number of tokens.
        ids: Number of token ids.
        width: Size of a token's vector.
        depth: Number of layers.
        heads: Number of attention heads.
        dropout: Probability of dropping a value in training.
    """

    def __init__(self, length: int, ids: int, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(ids, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(TransformerLayer(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=INITIAL_STD)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the vectors `(B, length, width)` of token ids. The mask is not needed: see `CausalTransformer`."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        vectors = self.tokens(input_ids) + self.positions(places)
        return cast(Tensor, self.norm(self.layers(self.dropout(vectors))))


class TransformerLayer(nn.Module):
    """Causal self-attention and an MLP of four times the width, each added to its normalized input.

    Args:
        width: Size of a token's vector.
        heads: Number of attention heads.
        dropout: Probability of dropping a value in training.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the new vectors `(B, length, width)` of a batch of texts."""
        x = x + self.dropout(self.projection(self.attend(self.attention_norm(x))))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

    def attend(self, x: Tensor) -> Tensor:
        """Return causal self-attention `(B, length, width)`: means of the values of the positions up to each one."""
        queries, keys, values = self.queries_keys_values(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(1, 2).flatten(2)
