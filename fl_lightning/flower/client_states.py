"""Storage of a client's most recent states, in a folder on the client's own machine."""

from __future__ import annotations

import json
from pathlib import Path

from fl_lightning.core.errors import FLError
from fl_lightning.core.files import file_checksum, flush, read_file, write_atomically
from fl_lightning.core.state_dicts import State
from fl_lightning.runs.background_writer import Writer
from fl_lightning.runs.client_store import ClientStore

KEPT = 3
"""States that are kept: a server that is killed while it writes a checkpoint resumes two rounds back."""


class StateMissing(FLError):
    """The state from which the server wants the client to continue is missing or damaged."""

    exit_code = 1


class ClientStates:
    """Stores the states of one client in one run, each after a round. Keeps the three that were used most recently.

    The server may name an older state than the newest, for example in a task that is delivered again. Such a task uses
    this state, so the state is kept, too.

    Each state is written once, and listed with its checksum in `rounds.json`, which is replaced when the state is on
    disk. So a machine that is killed at any time continues from a complete state.

    Args:
        folder: The folder. Only the user can read it.
        client: The client's id.
        experiment: Digest of the experiment, which must stay the same.

    Raises:
        StateMissing: The folder holds another experiment.
    """

    def __init__(self, folder: Path, client: int, experiment: str) -> None:
        self.folder, self.client, self._file = folder, client, folder / "rounds.json"
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._store = ClientStore(folder, "memory", Writer())
        self._rounds: dict[int, dict[str, str]] = {}
        self._about = {"client": client, "experiment": experiment}
        if self._file.exists():
            saved = json.loads(read_file(self._file))
            if {key: saved[key] for key in self._about} != self._about:
                raise StateMissing("the state on this machine is that of another experiment or client")
            self._rounds = {int(round): files for round, files in saved["rounds"].items()}

    def read(self, round: int) -> State:
        """Return the client's state after a round. For round -1 (no state stored yet), return an empty state.

        Raises:
            StateMissing: The round's state is not on disk any more, or is damaged.
        """
        if round < 0:
            return {}
        if round not in self._rounds:
            held = ", ".join(map(str, sorted(self._rounds))) or "none"
            raise StateMissing(f"the client's state after round {round} is not on its machine, which has: {held}")
        for name, checksum in self._rounds[round].items():
            if checksum != file_checksum(self.folder / name):
                raise StateMissing(f"the client's state after round {round} is damaged")
        self._rounds[round] = self._rounds.pop(round)  # used last
        self._store.load(self._rounds[round])
        return dict(self._store.get(self.client, {}))

    def write(self, round: int, state: State) -> None:
        """Write the client's state after a round. Keep only the three states that were used most recently."""
        self._store.put(self.client, round, state)
        self._store.end_round()
        files = self._store.write(self._store.snapshot())
        others = [each for each in self._rounds if each != round]
        self._rounds = {each: self._rounds[each] for each in others[1 - KEPT :]} | {round: files}
        write_atomically(self._file, json.dumps({**self._about, "rounds": self._rounds}) + "\n")
        flush(self.folder)
        self._store.prune(lambda: {name for files in self._rounds.values() for name in files})
