"""`ClientStore`: what clients keep from one of their rounds to the next, in memory or on disk."""

from __future__ import annotations

import hashlib
import re
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
from fl_lightning.core.message import Tensors
from fl_lightning.core.state import State
from fl_lightning.runs.writer import Writer

FOLDER = "clients"
MAPPED = 16  # clients whose files stay open between reads


@dataclass
class Kept:
    """What one client kept after one round: in memory, in a file, or both.

    Args:
        file: Its file, below the run's folder.
        memory: None where it is to be read from the file.
        checksum: The file's, once that is written.
    """

    file: str
    memory: State | None
    checksum: str | None = None


class ClientStore(Mapping[int, State]):
    """Each client's memory by its id; who keeps nothing is not in it.

    A client has one safetensors file for each round it took part in, below `clients/` in the run's folder:
    written once, never changed. With `disk` it is written as soon as the client is done and memory-mapped when read;
    with `memory` it is written with the next checkpoint, from what is held here.

    Args:
        run_dir: The run's folder.
        where: `memory` or `disk`.
        writer: The thread that writes.
    """

    def __init__(self, run_dir: Path, where: Literal["memory", "disk"], writer: Writer) -> None:
        self.run_dir, self.on_disk, self.writer = run_dir, where == "disk", writer
        self._kept: dict[int, Kept] = {}
        self._coming: dict[int, Kept] = {}
        self._mapped = lru_cache(MAPPED)(self._read)

    def __getitem__(self, client: int) -> State:
        kept = self._kept[client]
        memory = kept.memory  # looked at once: the writer lets go of it in between
        return self._mapped(kept.file) if memory is None else memory

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, client: int, round: int, memory: State) -> None:
        """Take a copy of what a client keeps after a round; it is seen once the round is over.

        Raises:
            CheckpointError: The disk refuses, this client's file or one before it.
            ConfigError: A section has a name that cannot be written.
        """
        for section in memory:
            if "/" in section:
                raise ConfigError(f"a client's memory: section {section!r} has a / in its name; give it another")
        kept = Kept(f"{FOLDER}/client-{client:06d}-round-{round:06d}.safetensors", copied(memory))
        self._coming[client] = kept
        if self.on_disk and kept.memory:
            self.writer.submit(partial(self._write, kept))

    def turn(self) -> None:
        """The round is over: what was put since the last is what those clients keep."""
        for client, kept in self._coming.items():
            if kept.memory == {}:
                self._kept.pop(client, None)
            else:
                self._kept[client] = kept
        self._coming = {}

    def beside(self, state: State, section: str | None) -> State:
        """The shared state and, as `peer_<k>`, the named section of each client's memory, read when asked for.

        Nothing else that a client keeps can be had from it. Without a name it is the state itself.
        """
        return state if section is None else Beside(state, lambda client: self[client][section])

    # --- Checkpoints ---

    def snapshot(self) -> list[Kept]:
        """All that is kept now, to hand to `write`."""
        return list(self._kept.values())

    def write(self, snapshot: Iterable[Kept]) -> dict[str, str]:
        """Write what of a snapshot has no file yet; every file with its checksum. For the writer's thread.

        Raises:
            CheckpointError: The disk refuses.
        """
        files = {kept.file: self._write(kept) for kept in snapshot}
        if files:
            flush(self.run_dir / FOLDER)
        return files

    def load(self, files: Mapping[str, str]) -> None:
        """Take up the files that a checkpoint names, each with its checksum, and forget everything else."""
        self._mapped.cache_clear()
        self._kept, self._coming = {}, {}
        for file, checksum in files.items():
            memory = None if self.on_disk else copied(self._read(file))
            self._kept[client_of(file)] = Kept(file, memory, checksum)

    def prune(self, named: set[str]) -> None:
        """Remove the files that are not named, and what a killed writer left behind."""
        for pattern in ("client-*.safetensors", ".client-*.writing"):
            for path in (self.run_dir / FOLDER).glob(pattern):
                if f"{FOLDER}/{path.name}" not in named:
                    path.unlink()

    def _write(self, kept: Kept) -> str:
        if kept.checksum is None:
            assert kept.memory is not None
            path = self.run_dir / kept.file
            content = save({f"{section}/{name}": v for section, ts in kept.memory.items() for name, v in ts.items()})
            try:
                write_atomically(path, content)
            except OSError as error:
                raise CheckpointError(f"cannot write {path}: {error}") from error
            kept.checksum = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if self.on_disk:
            kept.memory = None
        return kept.checksum

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


class Beside(dict[str, Tensors]):
    """A state with sections that are looked up when asked for; see `ClientStore.beside`."""

    def __init__(self, state: State, publication: Callable[[int], Tensors]) -> None:
        super().__init__(state)
        self._publication = publication

    def __missing__(self, section: str) -> Tensors:
        peer = re.fullmatch(r"peer_(\d+)", section)
        if not peer:
            raise KeyError(section)
        return self._publication(int(peer[1]))


def client_of(file: str) -> int:
    """The client that a file is of."""
    return int(Path(file).name.split("-")[1])


def copied(memory: State) -> State:
    """A copy on the CPU, contiguous and in the order of a file: it comes back the same from wherever it is kept."""
    return {
        section: {
            name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, value in sorted(memory[section].items())
        }
        for section in sorted(memory)
        if memory[section]
    }
