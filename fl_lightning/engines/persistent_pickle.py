"""Pickling with keys in place of some objects, by pickle's `persistent_id`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any


class KeyPickler(pickle.Pickler):
    """A pickler that writes keys in place of some objects, such as tensors that are stored elsewhere.

    Args:
        file: The file to write to.
        key_of: Returns the key of an object, or None if the object itself is pickled.
        **options: Options of `pickle.Pickler`.
    """

    def __init__(self, file: Any, key_of: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(file, **options)
        self._key_of = key_of

    def persistent_id(self, value: Any) -> Any:
        """Return the key that replaces an object in the pickle; None to pickle the object itself."""
        return self._key_of(value)


class KeyUnpickler(pickle.Unpickler):
    """An unpickler for pickles of `KeyPickler`. It replaces each key with the object that the key stands for.

    Args:
        file: The file to read.
        load: Returns the object for a key.
        **options: Options of `pickle.Unpickler`.
    """

    def __init__(self, file: Any, load: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(file, **options)
        self._load = load

    def persistent_load(self, key: Any) -> Any:
        """Return the object that replaces a key of the pickle."""
        return self._load(key)
