"""FFA-LoRA: one random A for all clients, and the mean of the products (Sun et al., ICLR 2024)."""

import torch
from adapters import ADAPTED, PLAIN, LowRankMLP, adapters_by_hand, factor, mean_product
from experiments import UNEQUAL, experiment, in_float64, record_rounds, same_bytes
from loops import assert_equals_loop
from peers import mean_by_hand

from fl_lightning.algorithms import FFALoRA


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, FFALoRA(), model=PLAIN, **UNEQUAL)
    expected = adapters_by_hand(
        run,
        lambda before, ends, sizes, round: mean_by_hand(ends, sizes),
        is_frozen=lambda round, name: "lora_A" in name,
    )
    run.fit()
    assert_equals_loop(run, run.state["model"], {name: expected[name] for name in run.state["model"]})
    assert not {name for name in run.state["model"] if "lora_A" in name}


def test_training_leaves_the_bits_of_a_and_never_sends_it(tmp_path):
    run = experiment(tmp_path, FFALoRA(), model=LowRankMLP, optimizer_state="kept", **UNEQUAL)
    rounds = record_rounds(run)
    run.fit()
    for before, uploads, _ in rounds:
        messages = [before["model"], *(upload.message.section("model") for upload in uploads)]
        assert not any("lora_A" in name for message in messages for name in message)
    start = {name: value for name, value in run.worker.template.backbone.state_dict().items() if "lora_A" in name}
    assert len(start) == 2
    for client in range(run.clients):
        model = run.client_module(client).backbone.state_dict()
        assert same_bytes({name: model[name] for name in start}, start)


@in_float64
def test_the_mean_of_b_gives_the_mean_of_the_products(tmp_path):
    run = experiment(tmp_path, FFALoRA(), model=LowRankMLP, rounds=1, **UNEQUAL)
    rounds = record_rounds(run)
    run.fit()
    ((_, uploads, after),) = rounds
    frozen = run.worker.template.backbone.state_dict()
    models = [frozen | upload.message.section("model") for upload in uploads]
    for path in ADAPTED:
        exact = mean_product(models, path, [upload.n_samples for upload in uploads])
        product = after["model"][factor(path, "B")] @ frozen[factor(path, "A")]
        torch.testing.assert_close(product, exact, rtol=0, atol=1e-12)
