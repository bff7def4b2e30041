"""Placeholders for values that code must not read. Any use of them raises an error."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from fl_lightning.core.errors import ConfigError


class Hidden:
    """Base class of placeholders. A subclass sets `refusal`, the message of the error.

    Raises:
        ConfigError: Code reads an attribute or an element, or calls a function of torch with the placeholder.
    """

    refusal: ClassVar[str]

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise ConfigError(self.refusal)

    __getattr__ = __getitem__ = __len__ = __iter__ = __eq__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, *args: Any, **options: Any) -> NoReturn:
        """Refuse to be an argument of a function of torch."""
        raise ConfigError(cls.refusal)


class HiddenSamples(Hidden):
    """In place of a client's samples, for code whose results are not made private by the noise of DP-SGD."""

    refusal = (
        "dp_sgd: the method reads the client's samples outside of the noisy training steps. "
        "Use another method, or leave dp_sgd out"
    )
