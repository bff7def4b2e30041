"""FedSA-LoRA: A is shared, B never leaves its client (Guo et al., ICLR 2025)."""

import pytest
from adapters import PLAIN, LowRankMLP
from experiments import UNEQUAL, experiment, in_float64, record_rounds
from loops import assert_equals_loop, rounds_by_hand
from methods import assert_same_run

from fl_lightning.algorithms import FedSALoRA
from fl_lightning.engines import ProcessesEngine

FACTORS_B = ("encoder.1.lora_B.", "encoder.3.lora_B.")


@pytest.mark.parametrize(("personal", "begin"), [([], ()), (["head."], ("head.",))])
@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path, personal, begin):
    run = experiment(tmp_path, FedSALoRA(personal=["*.lora_B.*", *personal]), model=PLAIN, **UNEQUAL)
    shared, own = rounds_by_hand(run, personal=(*FACTORS_B, *begin))
    run.fit()
    assert_equals_loop(run, run.state["model"], {name: shared[name] for name in run.state["model"]})
    assert run.memory.keys() == own.keys()
    for client, entries in own.items():
        assert_equals_loop(run, run.memory[client]["personal"], entries)


def test_no_message_contains_b(tmp_path):
    run = experiment(tmp_path, FedSALoRA(), model=LowRankMLP, **UNEQUAL)
    rounds = record_rounds(run)
    run.fit()
    downloads = [run.server.download(4, client).tensors for client in range(run.clients)]
    uploads = [upload.message.tensors for _, uploads, _ in rounds for upload in uploads]
    for message in [*downloads, *uploads]:
        assert any("lora_A" in name for name in message)
        assert not any("lora_B" in name for name in message)


@pytest.mark.thorough
def test_processes_keep_the_same_factors(tmp_path):
    one, other = (
        experiment(tmp_path / name, FedSALoRA(), model=LowRankMLP, engine=engine, **UNEQUAL)
        for name, engine in {"one": "sequential", "two": ProcessesEngine(2)}.items()
    )
    one.fit()
    other.fit()
    assert_same_run(one, other)
