"""LG-FedAvg: the encoder stays on its client (Liang et al. 2020)."""

import copy

from experiments import UNEQUAL, descend, experiment, in_float64
from loops import assert_equals_loop, steps_of
from torch.nn import functional as F

from fl_lightning.algorithms import LGFedAvg


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, LGFedAvg(), **UNEQUAL)
    run.load()
    model = run.worker.template.backbone
    head, encoders = copy.deepcopy(model.head), {}
    for round in range(1, 4):
        ends, sizes = [], []
        for client in run.server.participants(round):
            local = copy.deepcopy(model)
            local.head.load_state_dict(head.state_dict())
            if client in encoders:
                local.encoder.load_state_dict(encoders[client])
            for x, y in steps_of(run, round, client):
                descend(local, F.cross_entropy(local(x), y), 0.2)
            encoders[client] = local.encoder.state_dict()
            ends.append(local.head.state_dict())
            sizes.append(len(run.data.shards[client].train))
        head.load_state_dict(
            {n: sum(s * e[n] for s, e in zip(sizes, ends, strict=True)) / sum(sizes) for n in ("weight", "bias")}
        )
    run.fit()
    assert_equals_loop(run, run.state["model"], {f"head.{name}": value for name, value in head.state_dict().items()})
    for client, encoder in encoders.items():
        kept = {f"encoder.{name}": value for name, value in encoder.items()}
        assert_equals_loop(run, run.memory[client]["personal"], dict(sorted(kept.items())))
