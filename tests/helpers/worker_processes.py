"""Loss terms that observe or kill the worker process they run in."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch

from fl_lightning.client.fit import ClientTrainerView
from fl_lightning.client.loss_term import LossTerm


class Witness(LossTerm):
    """A loss term that encodes the settings of its process as the loss."""

    def begin(self, module):
        self.common = isinstance(module.trainer, ClientTrainerView)

    def forward(self, step):
        found = torch.get_num_threads() + 10 * (torch.get_float32_matmul_precision() == "high")
        found += 100 * (multiprocessing.parent_process() is not None)
        return step.logits.sum() * 0 + found + 1000 * self.common


class Busy(LossTerm):
    """A loss term that takes 0.2 seconds of processor time of each client, at its first step."""

    def begin(self, module):
        self.started = False

    def forward(self, step):
        if not self.started:
            self.started, start = True, time.process_time()
            while time.process_time() - start < 0.2:
                pass
        return step.logits.sum() * 0


class Slow(LossTerm):
    """A loss term that waits in each step."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, step):
        time.sleep(self.seconds)
        return step.logits.sum() * 0


class Deadly(LossTerm):
    """A loss term that sends signals in round 2, to its own process or to the main process."""

    def __init__(self, folder, times, samples=None, to="own", signum=signal.SIGKILL):
        super().__init__()
        self.folder, self.times, self.samples, self.to, self.signum = str(folder), times, samples, to, signum
        self.leader, self.due = os.getpid(), False

    def begin(self, module):
        wanted = self.samples is None or int(module.context.class_counts.sum()) == self.samples
        self.due = wanted and module.context.round == 2

    def forward(self, step):
        if self.due and os.getpid() != self.leader:
            for number in range(self.times):
                try:
                    (Path(self.folder) / f"kill-{number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(self.leader if self.to == "leader" else os.getpid(), self.signum)
                break
        return step.logits.sum() * 0


class Harmless(LossTerm):
    """A loss term that computes the same as `Deadly` and sends no signals."""

    name = "deadly"

    def forward(self, step):
        return step.logits.sum() * 0
