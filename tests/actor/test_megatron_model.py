"""Steps of a model on real ranks; `tests/parallel` compares the layouts."""

from __future__ import annotations

import math

import pytest
import torch

from mega_agentrl.actor.megatron_model import compute_learning_rate
from mega_agentrl.actor.training.step_result import StepResult, summarize_steps
from mega_agentrl.config.enums import LrSchedule
from mega_agentrl.config.sections.policy import OptimConfig
from mega_agentrl.errors import InputError
from tests.actor import megatron_model_jobs
from tests.parallel.merge import assemble, scores_by_row
from tests.parallel.policy_jobs import run_calls
from tests.parallel.reference import LR, adamw, load_model, score
from tests.tiny_models import make_tiny_model
from tests.train_batches import select_rows


def test_a_step_moves_the_weights_like_adamw(rank_pool, train_config, checkpoints, batch):
    config = train_config(checkpoints[False], tensor=2, data=2)
    config.optim.weight_decay = 0.1
    calls = [("sft_step", batch, LR), ("weights",)]
    ranks = rank_pool.run(run_calls, 4, config, calls)
    model = load_model(checkpoints[False])
    optimizer = adamw(model, config)
    logp_BT, _ = score(model, batch, 1.0)
    (-logp_BT[batch.mask_BT].mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip)
    optimizer.step()
    expected = dict(model.named_parameters())
    shapes = {name: value.shape for name, value in expected.items()}
    # Replicas are equal to the bit: each element is stepped once and handed round.
    got = assemble([rank[1] for rank in ranks], shapes, atol=0.0)
    for name, value in got.items():
        # Adam divides by the gradient's own size: where that is near 0 the step is noise.
        far = (value - expected[name]).abs() > 1e-4
        assert far.float().mean() < 0.01, name


def test_more_data_ranks_than_rows_take_the_same_step(rank_pool, train_config, checkpoints, batch):
    one = select_rows(batch, [1])
    calls = [("sft_step", one, LR), ("compute_log_probs", one)]
    (alone,) = rank_pool.run(run_calls, 1, train_config(checkpoints[True]), calls)
    both = rank_pool.run(run_calls, 2, train_config(checkpoints[True], data=2), calls)
    for rank in both:
        assert rank[0].loss == pytest.approx(alone[0].loss, abs=1e-5)
        assert rank[0].grad_norm == pytest.approx(alone[0].grad_norm, rel=1e-4)
    logp_BT, _ = scores_by_row([rank[1] for rank in both], one)
    torch.testing.assert_close(logp_BT, alone[1][1], rtol=0, atol=1e-4)


def test_activities_name_the_ranks_that_a_rank_waits_for(
    rank_pool, tmp_path, train_config, checkpoints, batch
):
    config = train_config(checkpoints[False], tensor=2, data=2)
    job = megatron_model_jobs.activities_of_a_step
    ranks = rank_pool.run(job, 4, config, batch, str(tmp_path / "model"))
    # Tensor first: ranks 2 and 3 are the second data rank's.
    assert ranks[3] == [
        ("creation of the process groups", "all ranks 0, 1, 2, 3"),
        ("passes of micro-batches", "tensor ranks 2, 3"),
        ("gradient reduction", "data ranks 1, 3 and tensor ranks 2, 3"),
        ("optimizer step", "all ranks 0, 1, 2, 3"),
        ("sum of the metrics", "data ranks 1, 3"),
        ("writing of the model", "all ranks 0, 1, 2, 3"),
    ]


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_a_closed_model_leaves_no_thread(rank_pool, tmp_path, train_config, batch, model):
    folder = make_tiny_model(model, tmp_path / model)
    job = megatron_model_jobs.threads_left_behind
    for with_policy, left in rank_pool.run(job, 2, train_config(folder, data=2), batch):
        assert with_policy > 10
        assert left <= 0


def test_a_batch_without_a_trained_token_takes_no_step(rank_pool, train_config, checkpoints, batch):
    bare = batch.with_fields(mask_BT=torch.zeros_like(batch.mask_BT))
    calls = [("weights",), ("sft_step", bare, LR), ("weights",)]
    (((*before,), stats, (*after,)),) = rank_pool.run(
        run_calls, 1, train_config(checkpoints[True]), calls
    )
    assert (stats.num_tokens, stats.num_skipped_steps) == (0, 0)
    assert all(torch.equal(old[2], new[2]) for old, new in zip(before, after, strict=True))


def test_the_schedule_counts_the_steps_that_were_taken(rank_pool, train_config, checkpoints, batch):
    config = train_config(checkpoints[True], data=2)
    config.optim.lr, config.optim.lr_schedule = 1e-3, LrSchedule.linear
    config.optim.lr_warmup_steps, config.total_steps = 2, 4
    ranks = rank_pool.run(megatron_model_jobs.scheduled_steps, 2, config, batch, (1,))
    for stats, num_steps in ranks:
        assert [step.num_skipped_steps for step in stats] == [0, 1, 0]
        # The second step was not taken, so the third has its learning rate.
        rates = [step.learning_rate for step in stats]
        assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3])
        assert num_steps == 2
        assert math.isnan(stats[1].grad_norm)


def test_a_model_of_another_shape_is_not_loaded(rank_pool, train_config, checkpoints):
    config = train_config(checkpoints[True])
    (message,) = rank_pool.run(megatron_model_jobs.refused_load, 1, config, str(checkpoints[False]))
    assert str(checkpoints[False]) in message


def test_a_summary_weights_metrics_by_tokens_and_leaves_skipped_norms_out():
    def step(loss, num_tokens, entropy, norm, *, taken=True):
        sums = {"loss": loss, "num_tokens": num_tokens, "entropy": entropy}
        return StepResult(metric_sums=sums, grad_norm=norm, learning_rate=norm / 10, applied=taken)

    steps = [step(1.0, 2, 6.0, 3.0), step(4.0, 6, 2.0, math.nan, taken=False)]
    stats = summarize_steps(steps, ("entropy",))
    assert (stats.loss, stats.grad_norm) == (2.5, 3.0)
    assert (stats.num_tokens, stats.num_skipped_steps) == (8, 1)
    assert stats.metrics == {"entropy": 1.0}
    nothing = summarize_steps([], ("entropy",))
    assert (nothing.loss, nothing.num_tokens, nothing.metrics["entropy"]) == (0.0, 0, 0.0)
    assert math.isnan(nothing.grad_norm)


def learning_rates(num_steps, total_steps, **settings):
    config = OptimConfig(**settings)
    return [compute_learning_rate(step, config, total_steps) for step in range(num_steps)]


HALF = 2.0**0.5 / 2


@pytest.mark.parametrize(
    ("total_steps", "settings", "expected"),
    [
        (6, {"lr": 0.8, "lr_warmup_steps": 4}, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]),
        (
            5,
            {"lr": 1.0, "min_lr": 0.2, "lr_schedule": LrSchedule.linear, "lr_warmup_steps": 1},
            [1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
        ),
        (
            4,
            {"lr": 2.5, "min_lr": 0.5, "lr_schedule": LrSchedule.cosine},
            [2.5, 1.5 + HALF, 1.5, 1.5 - HALF, 0.5, 0.5],
        ),
        (2, {"lr": 1.0, "lr_schedule": LrSchedule.cosine, "lr_warmup_steps": 10}, [0.1, 0.2]),
    ],
    ids=["constant", "linear", "cosine", "only-warm-up"],
)
def test_each_schedule_has_the_learning_rates_worked_out_by_hand(total_steps, settings, expected):
    rates = learning_rates(len(expected), total_steps, **settings)
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(("step", "total_steps"), [(-1, 5), (0, 0)])
def test_a_step_outside_the_run_is_refused(step, total_steps):
    with pytest.raises(InputError) as caught:
        compute_learning_rate(step, OptimConfig(), total_steps)
    assert caught.value.got == (step, total_steps)
