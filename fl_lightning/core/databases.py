"""Check SQLite databases of unknown origin before they are opened."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from fl_lightning.core.files import open_file, read_last_bytes

SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""End of a journal that names another file. SQLite deletes that file after it has used the journal."""


def check_database(path: Path) -> None:
    """Check a SQLite database that may come from anyone; it need not exist. Opening it then changes no other file.

    Raises:
        OSError: The database or its journal is a link or no file.
        ValueError: The journal names another file, or the database contains statements (triggers or views).
        sqlite3.Error: It is no database, or cannot be read.
    """
    if not path.exists():
        return
    journal = path.with_name(f"{path.name}-journal")
    if journal.exists() and read_last_bytes(journal).endswith(SUPER_JOURNAL):
        raise ValueError(f"{journal.name} names another file")
    with open_file(path, most=float("inf")):
        pass
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as database:
        if found := database.execute("SELECT name FROM sqlite_master WHERE type IN ('trigger', 'view')").fetchone():
            raise ValueError(f"it contains a trigger or a view ({found[0]})")
