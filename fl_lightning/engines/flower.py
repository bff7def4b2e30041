"""An engine that trains each client on its own machine, which keeps the client's data. Flower carries the messages."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fl_lightning.algorithms.protocols import Calibrates
from fl_lightning.core.errors import ConfigError, FLError, check_number, describe_error, one_short_line
from fl_lightning.core.message import Tensors
from fl_lightning.core.names import join_names
from fl_lightning.core.task import Result, Task, Tasks, failed_result
from fl_lightning.core.trusted_imports import require_trust
from fl_lightning.data.remote import DataDescription, check_same_form
from fl_lightning.engines.base import Engine
from fl_lightning.engines.client_order import ClientOrder
from fl_lightning.engines.flower_adapter import import_flower, push_message
from fl_lightning.engines.flower_checks import (
    BadMessage,
    check_result,
    check_versions,
    expected_answer,
    installed_versions,
    read_description,
    rehearse,
)
from fl_lightning.engines.flower_records import MEGABYTE, pack, pack_task, read_excess, unpack, unpack_result
from fl_lightning.engines.worker import Worker

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

POLL = 0.1  # seconds between looks for answers
PATIENCE = 0.5  # seconds to wait for the SuperLink before signals and deadlines are looked at
THREADS = 16  # requests to the SuperLink at a time
ASK = 3.0  # seconds after which a machine that has not answered is asked for its description
ASK_AGAIN = 10.0  # seconds after which it is asked again: the machine may have been killed with the question
RETURN = 5.0  # seconds that a machine has to come back in a round, if it did not answer in time in its last round


class NoAnswer(FLError):
    """A client's machine is away, or did not answer in time."""

    exit_code = 1


@dataclass
class Waiting:
    """A client's task that is not answered yet, with its deadline and the ids of the messages that contain it.

    Args:
        task: The task.
        fixed: Digest of the fixed tensors of the client's network, which its machine compares with its own.
        seconds: Seconds after which the client has failed.
        away: Whether the machine did not answer in time in its last round, and has not been back since.
        sent: Ids of the messages with the task. It is sent again to a machine that has lost it.
    """

    task: Task
    fixed: str
    seconds: float
    away: bool = False
    sent: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._started = time.monotonic()

    def restart(self, seconds: float) -> None:
        """Begin to wait again, for a machine that is back."""
        self.seconds, self.away, self._started = seconds, False, time.monotonic()

    @property
    def failure(self) -> NoAnswer | None:
        """The error if the time is over."""
        if time.monotonic() <= self._started + self.seconds:
            return None
        why = "its machine has signed off" if self.away else "engine.timeout"
        return NoAnswer(f"no answer in {self.seconds:g} seconds ({why})")


class FlowerEngine(Engine):
    """Trains each client on its own machine, which keeps the client's data and state. Flower carries the messages.

    `fl-lightning deploy` writes the config of a run, `fl-lightning fit` runs it, and `fl-lightning node` runs on each
    client's machine. On CPUs of the same model, results are identical to the sequential engine's with the same data and
    number of threads. Needs the extra `flower`.

    A machine that is restarted gets its task again. A client fails in a round if its machine does not answer in time,
    reports an error, or sends a message that is not as expected.

    Args:
        superlink: Name of the connection in Flower's `config.toml` to the SuperLink that reaches the clients' machines.
            `fit` needs it.
        wait: Seconds to wait for the machines of all clients before round 1.
        timeout: Seconds that a client may take in one round. By default there is no limit, and the run waits until a
            machine that is away is back. With a limit, a machine that stays away costs this time only once.
        max_megabytes: Largest message that is accepted from a client.
        logged: Names of the metrics that `client_callbacks`, or a LightningModule of your own, log in the clients'
            training. Answers with other names are refused.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        superlink: str | None = None,
        wait: float = 600,
        timeout: float | None = None,
        max_megabytes: float = 1024,
        logged: list[str] | None = None,
    ) -> None:
        require_trust("engine.superlink", superlink)
        check_number("engine.wait", wait, "[0, inf)")
        check_number("engine.timeout", timeout, "(0, inf)")
        check_number("engine.max_megabytes", max_megabytes, "(0, inf)")
        self.superlink, self.wait = superlink, wait
        self.timeout, self.max_megabytes, self.logged = timeout, max_megabytes, list(logged or [])
        self.link: ClientLink | None = None
        self._experiment = ""
        self._run = uuid4().hex
        self._missed: set[int] = set()  # clients that did not answer in time in their last round
        self._trained: dict[int, list[int]] = {}  # the last two rounds after which each client stored its state

    def connect(self, link: ClientLink, experiment: str) -> None:
        """Set the connection to the clients' machines, and the config that these machines receive.

        Args:
            link: The connection. It knows the machine of each client.
            experiment: The experiment's config, from which the clients' machines build it.
        """
        self.link, self._experiment = link, experiment

    def check(self, worker: Worker) -> None:
        """Check that the data are on the clients' machines, and that the algorithm does not need them on the server.

        Raises:
            ConfigError: The data are on the server, or the algorithm needs them there.
        """
        if not worker.data.is_remote:
            fix = "`fl-lightning deploy` writes the config of a run on the clients' machines"
            raise ConfigError(f"engine: FlowerEngine needs scenario.dataset RemoteClients. {fix}")
        if isinstance(worker.algorithm, Calibrates):
            name = type(worker.algorithm).__name__
            raise ConfigError(f"algorithm: {name} needs the clients' data on the server. Use another method")

    def run(self, worker: Worker, tasks: Tasks, done: ClientOrder) -> None:
        """Send each task to its client's machine, and pass on the results as they arrive.

        Raises:
            ConfigError: The run was not started from the command line.
        """
        if self.link is None:
            raise ConfigError("engine: FlowerEngine needs the command line. Start the run with `fl-lightning fit`")
        link = self.link
        link.check_interrupt = self.check_interrupt
        waiting = self._send_tasks(link, worker, tasks)
        examples = {worker.for_client(client).group: one.task for client, one in waiting.items()}  # one per network
        expected = {group: rehearse(worker, task) for group, task in examples.items()}  # while the clients train
        asked = time.monotonic()
        while waiting:
            self.check_interrupt()
            for result in self._results(link, worker, waiting, expected):
                done(result)
            if time.monotonic() - asked > ASK:
                asked = time.monotonic()
                link.ask(waiting)
            self._resend(link, waiting)
            if waiting:
                time.sleep(POLL)

    def _send_tasks(self, link: ClientLink, worker: Worker, tasks: Tasks) -> dict[int, Waiting]:
        """Send each task to its client's machine. Return the tasks by client."""
        waiting: dict[int, Waiting] = {}
        link.idle.clear()
        away = self._missed - link.connected_clients() if self._missed else set()
        for task in tasks:
            is_away = task.client in away
            fixed = worker.for_client(task.client).fixed_digest
            limit = min(self._limit, RETURN) if is_away else self._limit
            waiting[task.client] = Waiting(task, fixed, limit, is_away)
            self._send(link, waiting[task.client])
        if away:
            link.ask(away)
        return waiting

    @property
    def _limit(self) -> float:
        """Seconds that a client may take in one round."""
        return self.timeout or math.inf

    def _results(
        self, link: ClientLink, worker: Worker, waiting: dict[int, Waiting], expected: Mapping[int, Result | None]
    ) -> Iterator[Result]:
        """Remove from `waiting` the clients that have answered, or whose time is over, and yield their results."""
        answers = link.poll([name for one in waiting.values() for name in one.sent])
        for client, one in list(waiting.items()):
            answer = next((answers[name] for name in one.sent if name in answers), None)
            if answer and answer.has_error() and not read_excess(answer):  # it gets the task when it is back
                one.sent.clear()
                link.machines.pop(client, None)
                warn_of_absence(one.task)
                continue
            if answer:
                result = self._result(worker, one.task, answer, expected[worker.for_client(client).group])
                self._missed.discard(client)
            elif failure := one.failure:
                result = failed_result(one.task, failure)
                self._missed.add(client)
            else:
                continue
            del waiting[client]
            yield result

    def _resend(self, link: ClientLink, waiting: Mapping[int, Waiting]) -> None:
        """Send the tasks again to machines that are back without having them."""
        for client in link.idle & waiting.keys():
            if waiting[client].away:
                waiting[client].restart(self._limit)
            self._send(link, waiting[client])
        link.idle.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the run's id, and the last rounds (at most two) after which each client stored its state."""
        return {"run": self._run, "trained": dict(self._trained)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the run's id and the rounds of each client's stored states, as `state_dict` returned them."""
        if "run" in state:
            self._run, self._trained = state["run"], dict(state["trained"])

    def _send(self, link: ClientLink, one: Waiting) -> None:
        task = one.task
        known = [round for round in self._trained.get(task.client, []) if round < task.round + (not task.fit)]
        values = {"run": self._run, "experiment": self._experiment, "fixed": one.fixed}
        records = pack_task(task, max(known, default=-1), **values)
        if (sent := link.send(task.client, records, "train")) is not None:
            one.sent.append(sent)
        else:
            warn_of_absence(task)

    def _result(self, worker: Worker, task: Task, answer: Message, expected: Result | None) -> Result:
        """Return the result that a client's machine sent. If the answer is invalid, return a failed result.

        Args:
            worker: The model, data and options of the run.
            task: The client's task.
            answer: The message of the client's machine.
            expected: The result of `rehearse` for clients with the same network.
        """
        try:
            if excess := read_excess(answer):
                raise BadMessage(excess)
            contents = unpack(answer.content, self.max_megabytes * MEGABYTE)
            result = unpack_result(task, contents, worker.algorithm.public)
            if not result.failure:
                dense = with_dense_upload(worker, task, result)
                check_result(dense, task, expected_answer(worker, task.client, self.logged, expected))
                if dense.upload and worker.algorithm.uploads_vary:
                    self.try_upload(dense, shared_entries(worker, task.client))
        except Exception as error:  # whatever a client sends, it is the failure of this client only
            return failed_result(task, BadMessage(one_short_line(describe_error(error))))
        if task.upload and not result.failure:
            before = [round for round in self._trained.get(task.client, []) if round < task.round]
            self._trained[task.client] = [*before[-1:], task.round]
        return result


def shared_entries(worker: Worker, client: int) -> Tensors:
    """Return the entries of a client's network that the method shares, with the values of the initial network."""
    backbone = worker.for_client(client).template.backbone
    state = backbone.state_dict()
    return {name: state[name] for name in worker.algorithm.shared_names(backbone)}


def with_dense_upload(worker: Worker, task: Task, result: Result) -> Result:
    """Return a client's result with an upload whose weights are not compressed, as the checks expect it.

    Raises:
        ValueError: The upload is not compressed as the run's compressor does it.
    """
    if not result.upload:
        return result
    received = worker.codec.restore_download(task.download, task.client).section("model")
    return replace(result, upload=worker.codec.restore_upload(result.upload, received, task.round, task.client))


def warn_of_absence(task: Task) -> None:
    """Warn that the machine of a task's client is away."""
    what = "its machine is away, and gets the task when it is back"
    warnings.warn(f"client {task.client}, round {task.round}: {what}", stacklevel=2)


class ClientLink:
    """The server's connection to the clients' machines: which machine a client has, and messages to and from it.

    Args:
        grid: Flower's grid.
        expected: The description of each client's data, by client id. By default any.

    Attributes:
        machines: The id of each client's machine, by client id.
        found: The description that each client's machine has sent, by client id.
        idle: The clients whose machines have described their data since the engine cleared this set. A machine
            describes its data only when it is idle.
    """

    def __init__(self, grid: Grid, expected: Sequence[DataDescription] | None = None) -> None:
        self.grid, self.expected = grid, expected
        self.machines: dict[int, int] = {}
        self.found: dict[int, DataDescription] = {}
        self._questions: dict[str, int] = {}  # messages of `ask` without an answer: the machine, by the message's id
        self._asked: dict[int, float] = {}
        self.idle: set[int] = set()
        self.check_interrupt: Callable[[], None] = lambda: None
        self._threads = ThreadPoolExecutor(THREADS)
        self._pulls: dict[str, Future[Iterable[Message]]] = {}  # requests for answers, by the id of the message

    def find(self, clients: int, timeout: float, report: Callable[[str], object]) -> list[DataDescription]:
        """Wait until the machines of all clients have described their data, and return the descriptions.

        Args:
            clients: Number of clients.
            timeout: Seconds to wait.
            report: Prints a line for the user: for which clients it waits.

        Raises:
            ConfigError: A client is missing, or the data of two clients have different forms.
        """
        end, reported = time.monotonic() + timeout, 0
        while missing := [client for client in range(clients) if client not in self.found]:
            left, names = end - time.monotonic(), join_names(missing)
            if left < 0:
                raise ConfigError(f"clients {names}: no machine has answered. Start `fl-lightning node` there")
            if len(missing) != reported:
                report(f"waiting up to {left:.0f} s for {len(missing)} of {clients} machines: clients {names}")
                reported = len(missing)
            self.ask(missing)
            self.poll()
            time.sleep(POLL)
        descriptions = [self.found[client] for client in range(clients)]
        check_same_form(descriptions)
        return descriptions

    def connected_clients(self) -> set[int]:
        """Return the clients whose machines are connected to the SuperLink."""
        connected = {*self._call(self.grid.get_node_ids)}
        return {client for client, machine in self.machines.items() if machine in connected}

    def send(self, client: int, records: RecordDict, kind: str) -> str | None:
        """Send records to a client's machine, and return the message's id; None if the machine is not known."""
        if client not in self.machines:
            return None
        flower = import_flower()
        return self._push(flower.Message(records, self.machines[client], kind))

    def ask(self, clients: Iterable[int]) -> None:
        """Ask the machines of these clients, and each machine whose client is not yet known, to describe their data."""
        now = time.monotonic()
        known = {machine: client for client, machine in self.machines.items()}
        flower, wanted = import_flower(), {*clients}
        for machine in self._call(self.grid.get_node_ids):
            is_due = now > self._asked.get(machine, 0.0) + ASK_AGAIN
            if is_due and known.get(machine, -1) in {*wanted, -1}:
                question = flower.Message(pack({}, {}, {"kind": "describe"}), machine, "query")
                self._questions[self._push(question)], self._asked[machine] = machine, now

    def poll(self, ids: Iterable[str] = ()) -> dict[str, Message]:
        """Receive the answers of clients' machines that have arrived, without waiting for all answers.

        Descriptions that `ask` has asked for are received and recorded as well.

        Args:
            ids: Ids of the messages that were sent and are not answered yet.

        Returns:
            The answers that have arrived, by the ids of the messages that they answer.
        """
        for name in {*ids, *self._questions} - self._pulls.keys():
            self._pulls[name] = self._threads.submit(self.grid.pull_messages, [name])
        wait(self._pulls.values(), timeout=PATIENCE)  # if a machine was killed while sending, its pull takes minutes
        ended = [name for name, pull in self._pulls.items() if pull.done()]
        messages = [message for name in ended for message in self._pulls.pop(name).result()]
        arrived = {message.metadata.reply_to_message_id: message for message in messages}
        for question in arrived.keys() & self._questions.keys():
            self._record_client(self._questions.pop(question), arrived[question])
        return arrived

    def _push(self, message: Message) -> str:
        """Send a message, and return its id. Sending is repeated until the SuperLink has received the whole message."""
        while (sent := self._call(push_message, self.grid, message)) is None:
            self.check_interrupt()
            time.sleep(POLL)
        return str(sent)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of Flower's grid in another thread, so that a signal can interrupt its endless retries."""
        future = self._threads.submit(function, *args)
        while not wait([future], timeout=PATIENCE).done:
            self.check_interrupt()
        return future.result()

    def _record_client(self, machine: int, answer: Message) -> None:
        """Record which client a machine belongs to, from the answer in which the machine describes its data."""
        if answer.has_error():
            return
        try:
            values = unpack(answer.content, MEGABYTE).values
            if failure := values.get("failure"):
                raise BadMessage(str(failure))
            if warning := check_versions(values):
                warnings.warn(f"machine {machine}: {warning}", stacklevel=2)
            client, described = read_description(values)
        except Exception as error:  # whatever a machine sends, only this machine is not used
            reason = one_short_line(describe_error(error))
            warnings.warn(f"machine {machine}: it is not used: {reason}", stacklevel=2)
            return
        if self.expected and not (client < len(self.expected) and described == self.expected[client]):
            warnings.warn(f"client {client}: its data are not those of the run. It is not used", stacklevel=2)
            return
        if self.found.setdefault(client, described) != described:
            warnings.warn(f"client {client}: another machine has this client, too. It is not used", stacklevel=2)
            return
        self.machines[client] = machine
        self._asked.pop(machine, None)
        self.idle.add(client)


def describe_client(client: int, described: DataDescription) -> RecordDict:
    """Pack the description of a client's data (sizes, shapes, digest) into Flower records, for the server."""
    return pack({}, {}, {"kind": "description", "client": client, **asdict(described), **installed_versions()})
