"""Storage of the tensors that clients keep between rounds (client states), in memory or on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fl_lightning.core.errors import CheckpointError, ConfigError
from fl_lightning.core.files import flush, write_atomically
from fl_lightning.core.state_dicts import State
from fl_lightning.runs.background_writer import Writer

FOLDER = "clients"
OPEN_FILES = 16  # clients whose files stay open between reads


@dataclass
class StoredState:
    """A client's state after one round, held in memory, in a file, or both.

    Args:
        file: Path of the file, relative to the run folder.
        memory: The state; None if it has to be read from the file.
        checksum: Checksum of the file; None until it is written.
    """

    file: str
    memory: State | None
    checksum: str | None = None


class ClientStore(Mapping[int, State]):
    """The states that clients keep between rounds, by client id. Clients without a state have no entry.

    Each client has a safetensors file in `clients/` for each round it took part in, which is written once and never
    changed. With `disk`, the file is written when the client has finished, and memory-mapped when read. With `memory`,
    it is written with the next checkpoint.

    Args:
        run_dir: The run folder.
        where: `memory` or `disk`.
        writer: The background writer.
    """

    def __init__(self, run_dir: Path, where: Literal["memory", "disk"], writer: Writer) -> None:
        self.run_dir, self.on_disk, self.writer = run_dir, where == "disk", writer
        self._stored: dict[int, StoredState] = {}
        self._pending: dict[int, StoredState] = {}
        self._mapped = lru_cache(OPEN_FILES)(self._read)

    def __getitem__(self, client: int) -> State:
        stored = self._stored[client]
        memory = stored.memory  # read once: the background writer may set it to None
        return self._mapped(stored.file) if memory is None else memory

    def __iter__(self) -> Iterator[int]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, client: int, round: int, state: State) -> None:
        """Store a copy of a client's state after a round. Until the round ends, the store still returns the old state.

        Raises:
            CheckpointError: This client's file or an earlier one cannot be written.
            ConfigError: The name of a section contains a slash.
        """
        for section in state:
            if "/" in section:
                raise ConfigError(f"client state: section {section!r} contains a slash. Rename it.")
        stored = StoredState(f"{FOLDER}/client-{client:06d}-round-{round:06d}.safetensors", copy_to_cpu(state))
        self._pending[client] = stored
        if self.on_disk and stored.memory:
            self.writer.submit(partial(self._write, stored))

    def end_round(self) -> None:
        """Replace the clients' old states by those that `put` stored during the round."""
        for client, stored in self._pending.items():
            if stored.memory == {}:
                self._stored.pop(client, None)
            else:
                self._stored[client] = stored
        self._pending = {}

    # --- Checkpoints ---

    def snapshot(self) -> list[StoredState]:
        """Return the current states of all clients, which `write` can save while the next round runs."""
        return list(self._stored.values())

    def write(self, snapshot: Iterable[StoredState]) -> dict[str, str]:
        """Write the client states that have no file yet, and return all files' checksums. Called in the background.

        Raises:
            CheckpointError: Writing fails.
        """
        files = {stored.file: self._write(stored) for stored in snapshot}
        if files:
            flush(self.run_dir / FOLDER)
        return files

    def load(self, files: Mapping[str, str]) -> None:
        """Replace all client states by those in the given files, which belong to a checkpoint."""
        self._mapped.cache_clear()
        self._stored, self._pending = {}, {}
        for file, checksum in files.items():
            memory = None if self.on_disk else copy_to_cpu(self._read(file))
            self._stored[client_id(file)] = StoredState(file, memory, checksum)

    def prune(self, named_files: Callable[[], set[str]]) -> None:
        """Remove client-state files that belong to no checkpoint, and partial files that killed processes left.

        Args:
            named_files: Returns the files that checkpoints name. It is only called if there are files.
        """
        patterns = "client-*.safetensors", ".client-*.writing"
        if files := [path for pattern in patterns for path in (self.run_dir / FOLDER).glob(pattern)]:
            named = named_files()
            for path in files:
                if f"{FOLDER}/{path.name}" not in named:
                    path.unlink()

    def _write(self, stored: StoredState) -> str:
        """Write a state that is in no file yet; return the checksum of its file."""
        if stored.checksum is None:
            assert stored.memory is not None
            path = self.run_dir / stored.file
            content = save({f"{section}/{name}": v for section, ts in stored.memory.items() for name, v in ts.items()})
            try:
                write_atomically(path, content)
            except OSError as error:
                raise CheckpointError(f"cannot write {path}: {error}") from error
            stored.checksum = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if self.on_disk:
            stored.memory = None
        return stored.checksum

    def _read(self, file: str) -> State:
        state: State = {}
        try:
            with safe_open(self.run_dir / file, "pt") as content:
                for key in sorted(content.keys()):
                    section, _, name = key.partition("/")
                    state.setdefault(section, {})[name] = content.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {self.run_dir / file}: {error}") from error
        return state


def client_id(file: str) -> int:
    """Return the client id that the name of a client-state file contains."""
    return int(Path(file).name.split("-")[1])


def copy_to_cpu(state: State) -> State:
    """Return a copy of a client state on the CPU, contiguous and sorted by name, like a state read from a file."""
    return {
        section: {
            name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, value in sorted(state[section].items())
        }
        for section in sorted(state)
        if state[section]
    }
