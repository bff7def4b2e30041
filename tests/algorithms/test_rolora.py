"""RoLoRA: B is trained in odd rounds, A in even rounds (Chen et al., NeurIPS 2025)."""

import torch
from adapters import ADAPTED, PLAIN, LowRankMLP, adapters_by_hand, factor, mean_product
from experiments import UNEQUAL, experiment, in_float64, record_rounds
from loops import assert_equals_loop
from peers import mean_by_hand

from fl_lightning.algorithms import RoLoRA


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, RoLoRA(), model=PLAIN, **UNEQUAL)
    expected = adapters_by_hand(
        run,
        lambda before, ends, sizes, round: mean_by_hand(ends, sizes),
        is_frozen=lambda round, name: ("lora_A" if round in (1, 3) else "lora_B") in name,
    )
    run.fit()
    assert_equals_loop(run, run.state["model"], {name: expected[name] for name in run.state["model"]})


@in_float64
def test_one_factor_changes_and_is_sent_in_each_round_and_the_mean_product_is_exact(tmp_path):
    run = experiment(tmp_path, RoLoRA(), model=LowRankMLP, optimizer_state="kept", **UNEQUAL)
    rounds = record_rounds(run)
    run.fit()
    for number, (before, uploads, after) in enumerate(rounds, 1):
        trained, frozen = "BA" if number % 2 else "AB"
        for path in ADAPTED:
            name, other = factor(path, trained), factor(path, frozen)
            assert all(name in upload.message.section("model") for upload in uploads)
            assert not any(other in upload.message.section("model") for upload in uploads)
            assert not torch.equal(before["model"][name], after["model"][name])
            assert torch.equal(before["model"][other], after["model"][other])
            models = [before["model"] | upload.message.section("model") for upload in uploads]
            exact = mean_product(models, path, [upload.n_samples for upload in uploads])
            product = after["model"][factor(path, "B")] @ after["model"][factor(path, "A")]
            torch.testing.assert_close(product, exact, rtol=0, atol=1e-12)
