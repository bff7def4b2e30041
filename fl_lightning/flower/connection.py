"""The connection of a client's machine to Flower's SuperLink, in place of Flower's SuperNode.

Flower's SuperNode starts a process for each message, which imports torch, and runs the code of the app that the server
sends. This one answers in its own process, and runs only code that is installed on the machine. It uses the SuperNode's
connection (`engines/flower_adapter.py`), with its TLS and authentication.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fl_lightning.core.errors import ConfigError, FLError, one_line
from fl_lightning.engines.flower_adapter import RunEnded, answer_message, describe_other_version, open_connection
from fl_lightning.engines.flower_records import unpack

if TYPE_CHECKING:
    from flwr.app import RecordDict

POLL = 0.1  # seconds between looks for messages
RETRY = 3.0  # seconds before a connection is opened again
REFUSED = 150.0  # seconds of refusals after which the node ends: a SuperLink takes a killed node for alive for a minute
LOCAL = ("127.0.0.1", "localhost", "[::1]")
"""Addresses that may be connected to without encryption."""


class Refused(FLError):
    """The SuperLink does not accept this machine."""

    exit_code = 1


@dataclass(frozen=True)
class Address:
    """The SuperLink's address, and the certificate and key files that a client's machine needs to connect to it.

    Args:
        superlink: `HOST:PORT`.
        certificate: File with the certificate of the authority that signed the SuperLink's; None without encryption.
        key: File with the private key of this machine, an OpenSSH key on an elliptic curve; None without
            authentication.

    Raises:
        ConfigError: The connection is not encrypted and leaves this machine, or a file cannot be read.
    """

    superlink: str
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if self.certificate is None and self.superlink.rpartition(":")[0] not in LOCAL:
            fix = "Give --certificate, the file ca.crt"
            raise ConfigError(f"--superlink: {self.superlink} is another machine, and needs encryption. {fix}")

    def read_certificate(self) -> bytes | None:
        """Return the certificate of the authority that signed the SuperLink's certificate; None without encryption."""
        return None if self.certificate is None else read("--certificate", self.certificate)

    def read_key(self) -> tuple[Any, Any] | None:
        """Return this machine's private and public key; None without authentication."""
        if self.key is None:
            return None
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key

        content = read("--key", self.key)
        try:
            private = load_ssh_private_key(content, None)
        except Exception as error:  # several libraries' errors
            raise ConfigError(f"--key: {self.key} is no OpenSSH private key: {one_line(error)}") from error
        if not isinstance(private, EllipticCurvePrivateKey):
            fix = "Make one with ssh-keygen -t ecdsa -b 384"
            raise ConfigError(f"--key: {self.key} is not on an elliptic curve. {fix}")
        return private, private.public_key()


def read(option: str, path: Path) -> bytes:
    """Return the content of a file that an option of the command line names.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}") from error


def serve(address: Address, answer: Callable[[RecordDict], RecordDict], report: Callable[[str], None]) -> None:
    """Answer the server's messages, endlessly. Open the connection to the SuperLink again whenever it is lost.

    Args:
        address: The address of the SuperLink.
        answer: Returns the answer to a message.
        report: Prints a line for the user.

    Raises:
        ConfigError: A file of the address cannot be read.
        Refused: The SuperLink does not accept this machine.
    """
    certificate, keys = address.read_certificate(), address.read_key()
    end, report = time.monotonic() + REFUSED, without_repetitions(report)
    while True:
        try:
            arguments = address.superlink, certificate is None, certificate, keys
            with open_connection(*arguments, refuse=refuse) as connection:
                report(f"connected to {address.superlink} as machine {connection[0]}")
                while True:
                    answer_next(connection, answer, report)
                    end = time.monotonic() + REFUSED
            reason = "the connection was lost"  # Flower has caught and logged the error
        except Refused as refused:
            if time.monotonic() > end:
                raise
            reason = str(refused)
        report(f"{reason}; trying again")
        time.sleep(RETRY)


def without_repetitions(report: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes each line to `report`, unless the line equals the previous one."""
    last = ""

    def report_new(line: str) -> None:
        nonlocal last
        if line != last:
            report(line)
        last = line

    return report_new


def refuse(message: str) -> NoReturn:
    """Raise the exception for a refusal by the SuperLink."""
    raise refusal(message)


def refusal(message: str) -> Refused:
    """Return the exception to raise if the SuperLink refuses this machine, with advice on how to fix the cause.

    The cause is found in Flower's `message`.
    """
    fix = "Register the key of this machine on the server (flwr supernode register). If it is registered, wait: "
    fix += "after a kill, the SuperLink takes a node for connected for up to a minute"
    if reason := describe_other_version(message):
        return Refused(f"--superlink: {reason}")
    if "hostname mismatch" in message.lower():
        fix = "Use the address for which the server's certificate was made (certificates.sh)"
    elif "certificate" in message.lower():
        fix = "Give the server's ca.crt as --certificate"
    return Refused(f"--superlink: {one_line(message).rstrip('.')}. {fix}")


def answer_next(connection: Any, answer: Callable[[RecordDict], RecordDict], report: Callable[[str], None]) -> None:
    """Answer the server's next message. If there is no message, wait a moment.

    If the message belongs to a run that has ended, report this instead.
    """
    try:
        answered = answer_message(connection, answer)
    except RunEnded:
        report("not answered: the message is of a run that has ended")
        return
    if answered:
        report(describe_answer(*answered))
    else:
        time.sleep(POLL)


def describe_answer(question: str, content: RecordDict, seconds: float) -> str:
    """Describe an answer to the server in one line for the user: how long it took, or why it failed."""
    failure = unpack(content, math.inf).values.get("failure")
    return f"failed: {question}: {failure}" if failure else f"answered: {question}, in {seconds:.2f} s"
