"""Text classifiers. Inputs are token ids `(B, length)`; 0 is padding, and outputs do not depend on it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fl_lightning.core.errors import check_number, check_positive
from fl_lightning.data.text import PADDING, UNKNOWN
from fl_lightning.models.base import Backbone
from fl_lightning.models.heads import Head


class FastText(Backbone):
    """Mean of a text's word vectors, then a linear layer (Joulin et al. 2017).

    Args:
        in_shape: `(length,)` token ids.
        num_classes: Number of classes, `C`.
        vocab_size: Number of ids with a vector. Larger ids (rarer words) count as unknown.
        embedding_dim: Size of a word's vector, the feature size.
        head: What comes after the features.

    Raises:
        ConfigError: A number is out of its range.
        ValueError: The input is not a text.
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        num_classes: int,
        vocab_size: int = 10_000,
        embedding_dim: int = 64,
        head: Head = Head(),
    ) -> None:
        encoder = nn.Sequential(WordVectors(in_shape, vocab_size, embedding_dim), MeanOverWords())
        super().__init__(*head.attach(encoder, embedding_dim, num_classes))


class TextCNN(Backbone):
    """Convolutions over 3, 4 and 5 words and their maxima over the text, with dropout (Kim 2014).

    Args:
        in_shape: `(length,)` token ids.
        num_classes: Number of classes, `C`.
        vocab_size: Number of ids with a vector. Larger ids (rarer words) count as unknown.
        embedding_dim: Size of a word's vector.
        channels: Channels of each of the three convolutions; the feature size is three times that.
        dropout: Probability of dropping a feature in training, below 1.
        head: What comes after the features.

    Raises:
        ConfigError: A number is out of its range.
        ValueError: The input is not a text.
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        num_classes: int,
        vocab_size: int = 10_000,
        embedding_dim: int = 64,
        channels: int = 100,
        dropout: float = 0.5,
        head: Head = Head(),
    ) -> None:
        check_positive("model.", channels=channels)
        check_number("model.dropout", dropout, "[0, 1)")
        words = WordVectors(in_shape, vocab_size, embedding_dim)
        encoder = nn.Sequential(words, WordConvolutions(embedding_dim, channels), nn.Dropout(dropout))
        super().__init__(*head.attach(encoder, 3 * channels, num_classes))


class BiLSTM(Backbone):
    """One bidirectional LSTM layer with outputs averaged over the text; FedDW's encoder for IMDB.

    Args:
        in_shape: `(length,)` token ids.
        num_classes: Number of classes, `C`.
        vocab_size: Number of ids with a vector. Larger ids (rarer words) count as unknown.
        embedding_dim: Size of a word's vector.
        hidden: Units per direction. The feature size is twice that.
        head: What comes after the features; FedDW's is `{mapping: [128, 128], classifier: bias_free}`.

    Raises:
        ConfigError: A number is out of its range.
        ValueError: The input is not a text.
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        num_classes: int,
        vocab_size: int = 10_000,
        embedding_dim: int = 64,
        hidden: int = 128,
        head: Head = Head(),
    ) -> None:
        check_positive("model.", hidden=hidden)
        words = WordVectors(in_shape, vocab_size, embedding_dim)
        encoder = nn.Sequential(words, TwoWayLSTM(embedding_dim, hidden), MeanOverWords())
        super().__init__(*head.attach(encoder, 2 * hidden, num_classes))


class Words(NamedTuple):
    """A batch of texts as word vectors, with a mask of the positions that are not padding.

    Attributes:
        vectors: `(B, length, d)`, zero at padding.
        real: `(B, length)` bool, False at padding.
    """

    vectors: Tensor
    real: Tensor


class WordVectors(nn.Embedding):
    """An embedding of token ids `(B, length)`. It returns `Words`: vectors, and a mask of real words.

    Args:
        in_shape: `(length,)`.
        vocab_size: Number of vectors, including the zero vector of padding.
        embedding_dim: Size of a vector.

    Raises:
        ConfigError: A number is out of its range.
        ValueError: `in_shape` is not the shape of token ids.
    """

    def __init__(self, in_shape: tuple[int, ...], vocab_size: int, embedding_dim: int) -> None:
        check_number("model.vocab_size", vocab_size, "[2, inf)", "padding and unknown words are two")
        check_positive("model.", embedding_dim=embedding_dim)
        if len(in_shape) != 1:
            raise ValueError(
                f"model: this network reads token ids (length,), the dataset has {tuple(in_shape)}; "
                "use a text dataset such as AGNews or IMDB"
            )
        super().__init__(vocab_size, embedding_dim, padding_idx=PADDING)

    def forward(self, ids: Tensor) -> Words:  # type: ignore[override]
        """Return the word vectors of token ids, with the mask of the positions that are not padding."""
        known = torch.where(ids < self.num_embeddings, ids, UNKNOWN)
        return Words(super().forward(known), ids != PADDING)


class MeanOverWords(nn.Module):
    """Average a text's word vectors to `(B, d)`, without padding; zero for a text without words."""

    def forward(self, words: Words) -> Tensor:
        """Return the mean vector over the words of each text, without padding."""
        vectors, real = words
        return vectors.sum(dim=1) / real.sum(dim=1, keepdim=True).clamp(min=1)


class WordConvolutions(nn.Module):
    """Convolutions over 3, 4 and 5 words, each reduced to its maximum over the text: `(B, 3 · channels)`.

    Args:
        embedding_dim: Size of a word's vector.
        channels: Channels of each convolution.
    """

    windows = (3, 4, 5)

    def __init__(self, embedding_dim: int, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv1d(embedding_dim, channels, size) for size in self.windows)

    def forward(self, words: Words) -> Tensor:
        """Return the maximum of each convolution's channels over the text, `(B, 3 · channels)`.

        Outputs of a convolution count only where its first position is a word, not padding.
        """
        vectors, real = words
        maxima = []
        for size, convolution in zip(self.windows, self.convolutions, strict=True):
            responses = F.relu(convolution(F.pad(vectors.transpose(1, 2), (0, size - 1))))
            # After ReLU no response is below zero, so a window masked to zero is never the only maximum.
            maxima.append((responses * real[:, None]).amax(dim=2))
        return torch.cat(maxima, dim=1)


class TwoWayLSTM(nn.LSTM):
    """A bidirectional LSTM over texts' word vectors, skipping padding. It returns vectors of size `2 · hidden`."""

    def __init__(self, embedding_dim: int, hidden: int) -> None:
        super().__init__(embedding_dim, hidden, batch_first=True, bidirectional=True)

    def forward(self, words: Words) -> Words:  # type: ignore[override]
        """Return `Words` with the LSTM's outputs in place of word vectors, and the same mask. Padding is skipped."""
        vectors, real = words
        lengths = real.sum(dim=1).clamp(min=1).cpu()  # an empty text is read as one word of padding
        packed = pack_padded_sequence(vectors, lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(super().forward(packed)[0], batch_first=True, total_length=real.shape[1])
        return Words(outputs, real)
