"""`examples/my_loss.py` as `algo.loss`: worked by hand, trained with, and checked before a run.

`tests/actor/training/test_objectives.py` trains with it on several ranks.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mega_agentrl.actor.training.losses import load_user_loss
from mega_agentrl.actor.training.objectives import (
    compute_policy_loss,
    policy_metrics,
)
from mega_agentrl.cli import load_user_algorithm
from mega_agentrl.config.checks.algo import check_algo
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.algo import AlgoConfig
from tests.config.refusals import refused, refused_input, refused_setting
from tests.parallel.reference import make_batch
from tests.rank_shards import pack_rows, policy_objective

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "my_loss.py")


def test_loss_and_gradients_are_those_worked_out_by_hand():
    """Ratios 4 and 1 with A = 1, 1/2 with A = -1 and a masked token; the bound is 1.5."""
    ratio_RT = torch.tensor([[4.0, 1.0], [0.5, 99.0]])
    advantage_RT = torch.tensor([[1.0, 1.0], [-1.0, 99.0]])
    logp_RT = ratio_RT.log().requires_grad_()
    algo = AlgoConfig(loss=EXAMPLE, loss_options={"max_ratio": 1.5})
    loss_RT, metrics = compute_policy_loss(
        algo,
        logp_RT,
        torch.zeros(2, 2),
        advantage_RT,
        torch.tensor([[True, True], [True, False]]),
    )
    loss_RT.sum().backward()
    torch.testing.assert_close(loss_RT.detach(), torch.tensor([[-1.5, -1.0], [0.5, 0.0]]))
    torch.testing.assert_close(logp_RT.grad, torch.tensor([[0.0, -1.0], [0.5, 0.0]]))
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {
            "clipfrac": 1 / 3,
            "clipfrac_lower": 0.0,
            "approx_kl": -math.log(2) / 3,
            "importance_ratio": 5.5 / 3,
        }
    )
    assert {"policy_loss", "importance_ratio", "entropy"} <= set(policy_metrics(algo))


def test_a_step_with_the_example_loss_follows_the_advantages():
    """Over micro-batches, with a table of logits as the policy."""
    batch = make_batch()
    num_tokens = int(batch.response_BT.max()) + 1
    logits_BTV = torch.zeros(*batch.response_BT.shape, num_tokens, requires_grad=True)

    def logps():
        return logits_BTV.log_softmax(-1).gather(-1, batch.response_BT[..., None]).squeeze(-1)

    old_BT = logps().detach()
    objective = policy_objective(AlgoConfig(loss=EXAMPLE), batch.with_fields(old_logp_BT=old_BT))
    for rows in ([4], [0, 5], [1, 2, 3]):
        micro = pack_rows(batch, rows, batch.mask_BT, torch.device("cpu"))
        loss, _ = objective(micro, logps()[rows], torch.zeros_like(old_BT[rows]))
        loss.backward()
    torch.optim.SGD([logits_BTV], lr=1.0).step()
    change_BT = logps().detach() - old_BT
    expected_BT = batch.advantage_BT.sign() * batch.mask_BT
    assert torch.equal(change_BT.sign(), expected_BT) and expected_BT.any()


def test_max_ratio_in_range_is_accepted_and_other_options_are_refused():
    config = TrainConfig(algo=AlgoConfig(loss=EXAMPLE, loss_options={"max_ratio": 2}))
    check_algo(config)
    load_user_algorithm(config)
    for options in ({"max_ratio": 0.5}, {"clip_low": 0.1}):
        config.algo.loss_options = options
        ((name, value),) = options.items()
        assert refused_setting(check_algo, config) == (f"algo.loss_options.{name}", value)


def test_a_function_without_the_decorator_is_not_loaded(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def loss(logp_BT, old_logp_BT, advantage_BT, mask_BT):\n    pass\n")
    error = refused(load_user_loss, str(file))
    assert (error.key, error.got) == ("algo.loss", str(file))
    assert "without the decorator" in error.cause


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("logp_BT[:, :1], {}", "loss_BT, mask_BT"),
        ("logp_BT, {'speed': logp_BT.sum()}", "metrics"),
    ],
    ids=["shape", "metric"],
)
def test_a_result_other_than_registered_is_an_error(tmp_path, value, name):
    file = tmp_path / "own.py"
    file.write_text(
        "from mega_agentrl.actor.training.losses import register_loss\n\n\n"
        "@register_loss('own', metrics=())\n"
        f"def loss(logp_BT, old_logp_BT, advantage_BT, mask_BT):\n    return {value}\n"
    )
    grid_RT = torch.zeros(2, 3)
    algo, mask_RT = AlgoConfig(loss=str(file)), torch.ones(2, 3).bool()
    error = refused_input(compute_policy_loss, algo, grid_RT, grid_RT, grid_RT, mask_RT)
    assert error.name == name
