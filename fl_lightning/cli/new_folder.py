"""Write the files that a command generates, such as those of a new project, to a new folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.terminal import echo


def write_new_folder(key: str, folder: Path, texts: Mapping[str, str]) -> None:
    """Write text files to a new folder, and print their names.

    Args:
        key: Names the folder in errors, such as `--out`.
        folder: The folder, which must not exist.
        texts: The content of each file, by name.

    Raises:
        ConfigError: The folder exists or cannot be written to.
    """
    try:
        folder.mkdir(parents=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise ConfigError(f"{key}: {folder} exists already. Choose another name.") from None
    except OSError as error:
        raise ConfigError(f"{key}: {folder} cannot be written to: {error}") from error
    echo(f"wrote {folder}/: {', '.join(sorted(texts))}")
