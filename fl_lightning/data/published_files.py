"""Base class of public datasets: finds, downloads and reads their published files."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.objectives import Classification
from fl_lightning.core.trusted_imports import require_trust
from fl_lightning.data.datasets import Dataset
from fl_lightning.data.files import BadFile, check_exists


class FileDataset(Dataset):
    """Base class of public datasets that are read from their original, published files.

    Args:
        data_dir: Folder that contains the dataset's file or folder.
        download: Download missing files.

    Attributes:
        files: The files that belong in `data_dir`, for error messages.
        fetchable: Whether they can be downloaded.
        class_names: Name of each class; None if the classes have no names.
    """

    files: str
    fetchable = True
    class_names: Sequence[str] | None = None
    objective = Classification()

    def __init__(self, data_dir: str = "data", download: bool = False) -> None:
        self.data_dir, self.download = data_dir, download

    @abstractmethod
    def _paths(self) -> Iterable[str]:
        """Return the files and folders that the dataset needs, relative to `data_dir`; folders end in a slash."""

    def _fetch(self) -> None:
        """Download the dataset's missing files. The base class downloads nothing."""

    @abstractmethod
    def _read(self, train: bool) -> tuple[Any, Any]:
        """Read the inputs and labels of the training or the test set. Raises `BadFile` if a file is damaged."""

    def _path(self, name: str) -> Path:
        return Path(self.data_dir, name)

    def _read_both(self) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Read the training and the test set. Missing files are downloaded first if `download` is set."""
        try:
            missing, failed = self._missing(), ""
            if missing and self.download:
                failed = self._try_download()
                missing = self._missing()
            if missing:
                raise ConfigError(self._files_not_found(missing, failed))
            return self._read(train=True), self._read(train=False)
        except BadFile as error:
            fetched = f", or delete it{self._or_download(' and set')}" if self.fetchable else ""
            raise ConfigError(f"{self.error_prefix} cannot be read: {error}. Replace the file{fetched}") from error

    def _missing(self) -> list[str]:
        try:
            check_exists(Path(self.data_dir), folder=True)
        except BadFile as error:
            raise ConfigError(f"scenario.dataset.data_dir: {error}") from error
        return [name for name in self._paths() if not check_exists(self._path(name), folder=name.endswith("/"))]

    def _try_download(self) -> str:
        """Download missing files. If this fails, return the reason in parentheses, otherwise an empty text.

        Folders that were created for files and are empty are removed.
        """
        require_trust("scenario.dataset.download", self.download)
        paths = {path for file in map(self._path, self._paths()) for path in (file, *file.parents)}
        absent = sorted((path for path in paths if not os.path.lexists(path)), reverse=True)  # innermost first
        try:
            self._fetch()
        except ConfigError:
            raise
        except Exception as error:  # URLError, RuntimeError, OSError, ...
            return f" (the download failed: {one_line(error)})"
        finally:
            for folder in absent:
                with suppress(OSError):  # not a folder, or not empty
                    folder.rmdir()
        return ""

    def _files_not_found(self, missing: list[str], failed: str) -> str:
        files = self.files if len(missing) == len(list(self._paths())) else ", ".join(missing)
        folder = one_line(os.path.abspath(self.data_dir))
        fix = f"or set scenario.dataset.data_dir{self._or_download(' or')}"
        return f"{self.error_prefix}: files not found{failed}. Put {files} into {folder}, {fix}"

    def _or_download(self, word: str) -> str:
        return f"{word} scenario.dataset.download true" if self.fetchable and not self.download else ""
