"""The task that a client runs in one round (`Task`), and the result that it returns (`Result`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lightning.pytorch.utilities.exceptions import SIGTERMException

from fl_lightning.core.errors import ClientFailure, NonFiniteError, describe_error, locate_user_code
from fl_lightning.core.message import Message
from fl_lightning.core.state_dicts import State


@dataclass(frozen=True)
class Score:
    """The metrics of a model on one set of samples, such as a client's test split, and the number of samples.

    Args:
        n: Number of samples, or of episodes.
        values: The metrics by name: the `loss`, the objective's own (the accuracy `acc`, or `mae`), and those of
            `evaluation.metrics` that are defined on these samples.
    """

    n: int
    values: dict[str, float]


@dataclass(frozen=True)
class Task:
    """A client's task in one round: the server's message, and whether to train, upload and evaluate.

    Args:
        round: The round, from 1.
        client: The client's id.
        download: The message from the server.
        memory: The state that the client kept from its last round.
        lr_scale: Factor on the learning rates, from the round's schedule.
        fit: Train; False leaves the model as received.
        upload: Return an upload and the client's new state.
        evaluate: Evaluate the client's model on the client's own test split.
        evaluate_globally: Evaluate the client's model on the global test set.
        keep_model: Store the model of the last round on the client's own machine. Nothing else is done.
        new_client: The client is held out of the training. Its task is its first, and changes no later one.
        keep_upload: The upload is needed longer than until the next result is requested. Otherwise the next client may
            overwrite its memory.
        max_steps: Number of training steps after which the fit ends, in addition to the trainer's limits.
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
    keep_model: bool = False
    new_client: bool = False
    keep_upload: bool = True
    max_steps: int | None = None

    @property
    def evaluates(self) -> bool:
        """Whether the client's model is evaluated after the upload."""
        return self.evaluate or self.evaluate_globally


class Tasks:
    """The tasks of several clients in one round, which are made one at a time.

    Args:
        clients: The ids of the clients.
        tasks: Their tasks, in the same order.
        fit: Whether the tasks train.
    """

    def __init__(self, clients: Sequence[int], tasks: Iterable[Task], fit: bool = True) -> None:
        self.clients, self.fit = clients, fit
        self._tasks = iter(tasks)

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[Task]:
        return self._tasks


@dataclass(frozen=True)
class Result:
    """The result of a client's task: its upload, new client state, training losses and test metrics, or its error.

    Args:
        client: The client's id.
        download_bytes: Size of the message from the server.
        upload: The client's message, or None if the task did not ask for one, or failed. Weights that the server only
            averages are on the training device, everything else is on the CPU.
        memory: The client's state for its next round.
        losses: Mean training loss per step: `loss`, `ce` and each term.
        logged: Metrics that callbacks logged in the client's fit, by name.
        local: Metrics on the client's own test split, if requested and not empty.
        on_global: Metrics on the global test set, if requested.
        failure: The error, if the task failed.
        untrained: Whether the evaluated model contains initial weights because the client has not trained yet.
        attack_success: Share of the predictions that attackers want which the evaluated model makes, if asked for.
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
    untrained: bool = False
    attack_success: float | None = None


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception in a client's task was caused by Ctrl-C or SIGTERM."""
    return isinstance(error, KeyboardInterrupt | SIGTERMException) or isinstance(error.__context__, KeyboardInterrupt)


def failed_result(task: Task, error: BaseException) -> Result:
    """Return the result of a client's task that raised an exception, with the exception as `failure`.

    Raises:
        BaseException: The error, if Ctrl-C or SIGTERM caused it, which ends the whole run.
    """
    if is_interrupt(error):
        raise error
    failure = ClientFailure(task.client, task.round, describe_error(error))
    failure.__cause__, failure.place = error, locate_user_code(error)
    failure.diverged = isinstance(error, NonFiniteError)
    return Result(task.client, task.download.nbytes, failure=failure)
