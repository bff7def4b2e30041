"""Simulated clocks: how many seconds a client needs for its work in a round."""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fl_lightning.core.arguments import PartMixin, number
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.files import read_file
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.scheduling.hours import DAY, Hours

COLUMNS = ("seconds_per_step", "download_mbit", "upload_mbit")
HOURS = ("online_from_h", "online_h")
BITS_PER_MBIT = 1e6


@dataclass(frozen=True)
class ClientWork:
    """The work of a client in a round.

    Args:
        steps: Number of training steps.
        down: Size of the message to the client, in bytes.
        up: Size of its upload, in bytes.
    """

    steps: int
    down: int
    up: int


class Clock(PartMixin, ABC):
    """Base class of simulated clocks. The config key is `clock`.

    The seconds may depend only on the seed, the client, its work and the round, so that all methods with one seed see
    the same devices, and a resumed run the same times.

    Attributes:
        hours: When the clients are online; None if they always are.
    """

    section = "clock"
    hours: Hours | None = field(default=None, init=False)

    def start(self, seed: int, clients: int) -> None:
        """Draw the clients' devices before round 1.

        Args:
            seed: The run's seed.
            clients: Number of clients.
        """
        self.seed, self.clients = seed, clients

    @abstractmethod
    def seconds(self, client: int, work: ClientWork, round: int) -> float:
        """Return the time between the server's message to a client and the end of the client's upload.

        Args:
            client: The client's id.
            work: What the client does.
            round: The round in which it is asked.
        """

    def end(self, client: int, work: ClientWork, round: int, time: float) -> float:
        """Return when a client's upload has ended. A client that goes offline continues when it is online again.

        Args:
            client: The client's id.
            work: What the client does.
            round: The round in which it is asked.
            time: When it is asked; it is online.
        """
        seconds = self.seconds(client, work, round)
        return self.hours.end(client, time, seconds) if self.hours else time + seconds


class DeviceClock(Clock):
    """Each client has a device with a speed and a link, drawn once from lognormal distributions.

    The time of a client is `down / download + steps · seconds_per_step + up / upload + latency`.

    Args:
        seconds_per_step: Median time of a training step.
        spread: Standard deviation of the logarithm of the clients' speeds. With 0 all devices are equally fast; with 1
            one client in six needs more than 2.7 times the median.
        download_mbit: Median speed of the links to the clients, in 10^6 bits per second.
        upload_mbit: Median speed of the links from the clients. A client has the same factor on both.
        link_spread: Standard deviation of the logarithm of the factor on the links' speeds.
        latency: Seconds that each client's round takes in addition.
        jitter: Standard deviation of the logarithm of a factor on the whole time, drawn anew in each round.
        online_share: Share of a day in which a client is online, at hours of its own. 1 is always.

    Raises:
        ConfigError: An argument is out of range.
    """

    seconds_per_step: float = number(0.1, "[0, inf)")
    spread: float = number(1.0, "[0, 10]", "0 makes all equal")
    download_mbit: float = number(20.0, "(0, inf]", "inf is a link that takes no time")
    upload_mbit: float = number(5.0, "(0, inf]", "inf is a link that takes no time")
    link_spread: float = number(1.0, "[0, 10]", "0 makes all equal")
    latency: float = number(0.0, "[0, inf)")
    jitter: float = number(0.0, "[0, 10]", "0 makes all equal")
    online_share: float = number(1.0, "(0, 1]", "1 is always online")

    def start(self, seed: int, clients: int) -> None:
        """Draw each client's factors on the time of a step and on the time of its link, and its hours."""
        super().start(seed, clients)
        normal = generator(seed, Stream.DEVICES).standard_normal((clients, 2))
        self._slow = np.exp(normal * (self.spread, self.link_spread))
        if self.online_share < 1:
            begin = generator(seed, Stream.DEVICES, 0).random(clients) * DAY
            self.hours = Hours(begin, np.full(clients, self.online_share * DAY))

    def seconds(self, client: int, work: ClientWork, round: int) -> float:
        """Return the time that a client needs in a round."""
        compute, link = self._slow[client]
        sent = work.down / self.download_mbit + work.up / self.upload_mbit
        total = compute * work.steps * self.seconds_per_step + link * 8 * sent / BITS_PER_MBIT + self.latency
        if self.jitter:
            total *= np.exp(self.jitter * generator(self.seed, Stream.DEVICES, round, client).standard_normal())
        return float(total)


class DeviceTrace(Clock):
    """Each client has a device of a file, drawn once with replacement.

    Args:
        path: A CSV file with the header `seconds_per_step,download_mbit,upload_mbit` and a row for each device. Speeds
            of links are in 10^6 bits per second. The columns `online_from_h` and `online_h` may follow: the hour of
            the day at which the device comes online, and for how many hours.

    Raises:
        ConfigError: The file cannot be read, or a value is out of range.
    """

    path: str

    def start(self, seed: int, clients: int) -> None:
        """Read the file, and draw a device for each client."""
        super().start(seed, clients)
        try:
            rows = list(csv.DictReader(read_file(Path(self.path), 2**30, links=True).decode().splitlines()))
            columns = COLUMNS + (HOURS if rows and HOURS[0] in rows[0] else ())
            devices = np.array([[float(row[name]) for name in columns] for row in rows])
        except (OSError, ValueError, TypeError, KeyError) as error:
            what = f"column {error} is missing" if isinstance(error, KeyError) else error
            raise ConfigError(f"clock.path: {self.path} cannot be read: {what}") from error
        if not len(devices) or not (devices[:, :3] > 0).all():
            raise ConfigError(f"clock.path: {self.path} needs at least one row, and only numbers above 0.")
        drawn = devices[generator(seed, Stream.DEVICES).integers(len(devices), size=clients)]
        self._devices, hours = drawn[:, :3], drawn[:, 3:].T * 3600
        if len(hours):
            begin, length = hours
            if not (np.isfinite(begin).all() and ((length > 0) & (length <= DAY)).all()):
                raise ConfigError(f"clock.path: {self.path}: online_h must be above 0 and at most 24.")
            self.hours = Hours(begin, length)

    def seconds(self, client: int, work: ClientWork, round: int) -> float:
        """Return the time that a client needs."""
        per_step, download, upload = self._devices[client]
        return float(per_step * work.steps + 8 * (work.down / download + work.up / upload) / BITS_PER_MBIT)
