"""The task of one client in one round, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning.pytorch.utilities.exceptions import SIGTERMException

from fl_lightning.core.errors import ClientFailure, FLError, one_line, users_place
from fl_lightning.core.message import Message
from fl_lightning.core.state import State


@dataclass(frozen=True)
class Score:
    """A model's result on one set of samples.

    Args:
        n: Number of samples, or of episodes.
        values: What was measured, by name: the `loss`, what the objective has beside it (`acc`, the share that is
            classified correctly, or `mae`), and the metrics that were asked for and are defined on these samples.
    """

    n: int
    values: dict[str, float]


@dataclass(frozen=True)
class Task:
    """The task of one client in one round.

    Args:
        round: The round, from 1.
        client: The client's id.
        download: What the server sent.
        memory: What the client kept from its last round.
        lr_scale: Factor on the learning rates, from the round's schedule.
        fit: Train; False leaves the model as received.
        upload: Make the upload, and what the client keeps.
        evaluate: Score the client's model on its own test split.
        evaluate_globally: Score the client's model on the global test set.
    """

    round: int
    client: int
    download: Message
    memory: State
    lr_scale: float = 1.0
    fit: bool = True
    upload: bool = True
    evaluate: bool = False
    evaluate_globally: bool = False


@dataclass(frozen=True)
class Result:
    """The result of a task.

    Args:
        client: The client's id.
        download_bytes: Size of what it was sent.
        upload: What it sends, or None where the task did not ask for it, or failed; its weights are on the training
            device where the server only averages them, all else on the CPU.
        memory: What it keeps for its next round.
        losses: Mean training loss a step: `loss`, `ce` and each term.
        logged: What callbacks logged in its fit, by name.
        local: Score on its own test split, if asked for and not empty.
        on_global: Score on the global test set, if asked for.
        failure: Why there is no upload.
    """

    client: int
    download_bytes: int
    upload: Message | None = None
    memory: State = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    local: Score | None = None
    on_global: Score | None = None
    failure: ClientFailure | None = None


def interrupts(error: BaseException) -> bool:
    """Return whether an error was caused by Ctrl-C or SIGTERM (Lightning raises a `SystemExit`), not by a client."""
    return isinstance(error, KeyboardInterrupt | SIGTERMException) or isinstance(error.__context__, KeyboardInterrupt)


def failed(task: Task, error: BaseException) -> Result:
    """The result of a task that an error broke off; `SystemExit` is one, as any other that a client's code raises.

    Raises:
        BaseException: The error, if it is an answer to Ctrl-C or SIGTERM: it is for the whole run.
    """
    if interrupts(error):
        raise error
    message = one_line(error)
    reason = message if isinstance(error, FLError) else ": ".join(filter(None, (type(error).__name__, message)))
    failure = ClientFailure(task.client, task.round, reason)
    failure.__cause__, failure.place = error, users_place(error)
    return Result(task.client, task.download.nbytes, failure=failure)
