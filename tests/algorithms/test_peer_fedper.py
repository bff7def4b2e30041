"""FedPer between peers: heads are never sent."""

import torch
from experiments import UNEQUAL, NormMLP, experiment, finished, in_float64, same_bytes
from loops import assert_equals_loop, assert_publications_equal_loop, peers_by_hand
from peers import model_of, published

from fl_lightning.algorithms import PeerFedPer, Ring
from fl_lightning.core.state_dicts import weighted_mean


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, PeerFedPer(graph=Ring()), **UNEQUAL)
    expected = peers_by_hand(run, personal="head.")
    run.fit()
    assert_publications_equal_loop(run, expected)
    for client, memory in run.memory.items():
        heads = {name: expected[client][name] for name in ("head.weight", "head.bias")}
        assert_equals_loop(run, memory["personal"], heads)


def test_heads_are_never_sent_and_return_to_their_client(tmp_path):
    run = finished(tmp_path, PeerFedPer(graph=Ring()), model=NormMLP, clients_per_round=6)
    start = run.worker.template.backbone.state_dict()
    encoder = sum(v.nbytes for name, v in start.items() if name.startswith("encoder."))
    assert run.csv.rows[-1]["comm/down_bytes"] == 6 * 2 * (encoder + 8)
    assert "global/acc" not in run.csv.rows[-1]
    heads = []
    for client in range(6):
        message = run.server.download(4, client)
        assert not [name for name in message.tensors if "head." in name]
        tensors, _ = published(run, client)
        assert not [name for name in tensors if "head." in name]
        module = run.worker.modules.receive(run.server.task(3, client, message))
        now = module.backbone.state_dict()
        kept = run.memory[client]["personal"]
        assert kept.keys() == {"head.weight", "head.bias"}
        assert same_bytes({name: now[name] for name in kept}, kept)
        heads.append(kept["head.weight"])
        around = [client, *sorted([(client - 1) % 6, (client + 1) % 6])]
        mean = weighted_mean([model_of(published(run, k)[0]) for k in around], [published(run, k)[1] for k in around])
        assert same_bytes({name: now[name] for name in mean}, mean)
    assert all(not torch.equal(heads[0], head) for head in [start["head.weight"], *heads[1:]])


def test_any_layers_can_be_personal(tmp_path):
    run = finished(tmp_path, PeerFedPer(personal=["encoder"]), rounds=1)
    names = {name.split("/")[-1] for name in run.server.download(2, 0).tensors}
    assert names == {"head.weight", "head.bias"}
