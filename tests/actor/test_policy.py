"""Policy ranks on real processes; `tests/parallel` compares the layouts."""

from __future__ import annotations

import json

import pytest
import torch
from torch.testing import assert_close

from mega_agentrl.actor.megatron_model import RankInfo
from mega_agentrl.actor.policy import PolicyRank, StepProfiler
from mega_agentrl.batch.packed_rows import unpack_scores
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.errors import InputError
from tests.parallel.merge import scores_by_row
from tests.parallel.policy_jobs import run_calls
from tests.tiny_models import make_tiny_model

LR = 1e-2


@pytest.fixture
def run(rank_pool, train_config, checkpoints):
    """Return `run(calls, layout, **leaves)`: results by [rank][call] on the tied checkpoint."""

    def on_ranks(calls, layout=None, **leaves):
        config = train_config(checkpoints[True], **(layout or {}))
        for key, value in leaves.items():
            *section, leaf = key.split("__")
            setattr(getattr(config, *section) if section else config, leaf, value)
        return rank_pool.run(run_calls, config.parallel.world_size, config, calls)

    return on_ranks


def test_minibatches_take_several_steps_and_count_each_token_once(run, batch):
    calls = [("update", batch, None, 0.0), ("update", batch, None, 0.1)]
    ((still, moving),) = run(calls, optim__num_minibatches=3)
    assert still.num_tokens == moving.num_tokens == int(batch.mask_BT.sum())
    assert moving.loss != pytest.approx(still.loss)


@pytest.mark.parametrize("layout", [{"data": 2}, {"pipeline": 2}], ids=["DP2", "PP2"])
def test_rows_that_are_left_out_change_no_bit_of_a_deterministic_update(run, batch, layout):
    """The second optimizer step has no signal at all, and Adam still moves the weights."""
    has_signal_B = torch.tensor([True, False, False, False, False, False])
    advantage_BT = torch.where(has_signal_B.unsqueeze(1), batch.advantage_BT, 0.0)
    silent = batch.with_fields(advantage_BT=advantage_BT)
    settings = {
        "deterministic": True,
        "optim__num_minibatches": 2,
        "optim__micro_batch_tokens": 13,  # the longest row
    }
    num_tokens, scores = [], []
    for rows in (None, has_signal_B):
        steps = [("update", silent, None, LR, None, rows)] * 2
        ranks = run([*steps, ("compute_log_probs", batch)], layout, **settings)
        num_tokens.append(ranks[0][0].num_tokens)
        scores.append(scores_by_row([rank[-1] for rank in ranks], batch)[0])
    assert num_tokens[0] == int(batch.mask_BT.sum()) > num_tokens[1] > 0
    assert torch.equal(*scores)


@pytest.mark.parametrize("layout", [{"data": 2}, {"pipeline": 2}, {"context": 2}], ids=str)
def test_without_a_scoring_pass_the_update_scores_the_batch_itself(run, batch, layout):
    ranks = run([("compute_log_probs", batch), ("update", batch, None, 0.0)], layout)
    logp_BT, entropy_BT = scores_by_row([rank[0] for rank in ranks], batch)
    expected = run(
        [("update", batch.with_fields(old_logp_BT=logp_BT), None, 0.0)],
        layout,
        optim__num_minibatches=1,
    )[0][0]
    ranks = run(
        [("update", batch.with_fields(old_logp_BT=None), None, 0.0), ("update_scores",)], layout
    )
    got = ranks[0][0]
    assert (got.loss, got.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-5)
    assert got.metrics["clipfrac"] == 0
    trained_B = batch.mask_BT.any(1)
    scored = unpack_scores([rank[1] for rank in ranks], batch.length_B, 12, trained_B)
    for value_BT, whole_BT in zip(scored, (logp_BT, entropy_BT), strict=True):
        assert_close(value_BT, torch.where(batch.mask_BT, whole_BT, 0.0), rtol=1e-5, atol=1e-6)


def test_a_weight_per_token_replaces_the_kl_coefficient(run, batch):
    weight_BT = torch.full(batch.mask_BT.shape, 0.3)
    ((by_token,),) = run([("update", batch, weight_BT, 0.0)])
    ((by_config,),) = run([("update", batch, None, 0.0)], algo__kl_coef=0.3)
    assert by_token.loss == pytest.approx(by_config.loss, abs=1e-6)
    assert by_token.metrics["ref_kl"] > 0


def test_the_reference_stays_while_the_weights_move(run, batch):
    calls = [
        ("compute_log_probs", batch),
        ("sft_step", batch, LR),
        ("compute_log_probs", batch, True),
        ("compute_log_probs", batch),
        ("sft_step", batch, LR),
        ("reset_optimizer",),
        ("compute_log_probs", batch, True),
        ("compute_log_probs", batch),
    ]
    # Replicas of the weights are exchanged under a distributed optimizer too.
    ranks = run(calls, {"data": 2, "pipeline": 2}, algo__kl_coef=0.1)
    start, reference, moved, new_reference, current = (
        scores_by_row([rank[call] for rank in ranks], batch)[0] for call in (0, 2, 3, 6, 7)
    )
    assert torch.equal(reference, start)
    assert (moved - start).abs().max() > 0.1
    assert torch.equal(new_reference, current)
    assert (new_reference - start).abs().max() > 0.1


def test_a_reset_optimizer_repeats_the_first_steps(run, batch, checkpoints):
    step = ("sft_step", batch, LR)
    ((first, second, _, _, again, anew),) = run(
        [step, step, ("reset_optimizer",), ("load_hf", str(checkpoints[True])), step, step]
    )
    assert again.loss == pytest.approx(first.loss, abs=1e-6)
    assert anew.loss == pytest.approx(second.loss, abs=1e-5)


def test_a_step_after_offloading_is_the_same_step(run, batch):
    everything, step = {"weights", "gradients", "optimizer"}, ("sft_step", batch, LR)
    ((*_, plain),) = run([step, step])
    turns = [("set_gpu_resident", parts) for parts in ({"weights"}, frozenset(), everything)]
    ((*_, turned),) = run([step, *turns, step])
    assert turned.loss == plain.loss
    assert turned.grad_norm == plain.grad_norm


def test_scores_are_zero_after_a_rows_end_and_at_the_rollouts_temperature(run, batch):
    (((rows, logp_BT, entropy_BT),),) = run([("compute_log_probs", batch)])
    (((_, cooler_BT, sharper_BT),),) = run([("compute_log_probs", batch)], rollout__temperature=0.5)
    inside_BT = torch.arange(12)[None, :] < batch.length_B[rows, None]
    assert torch.equal(logp_BT != 0, inside_BT)
    assert torch.equal(entropy_BT != 0, inside_BT)
    assert (sharper_BT[inside_BT] < entropy_BT[inside_BT]).all()
    assert not torch.allclose(cooler_BT, logp_BT)


def event_names(file):
    return {event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]}


def test_a_trace_has_the_forward_pass_and_the_update(run, batch, tmp_path):
    file = tmp_path / "step-1-rank0.json"
    passes = [("compute_log_probs", batch), ("update", batch, None, 0.0)]
    run([("start_profile",), *passes, ("stop_profile", str(file))])
    names = event_names(file)
    assert "aten::mm" in names or "aten::linear" in names
    assert any("Backward" in name for name in names), "the update is not in the trace"


def test_an_unfinished_trace_is_dropped_by_the_next_start(tmp_path):
    profiler, one, file = StepProfiler(), torch.ones(8, 8), tmp_path / "profile" / "trace.json"
    profiler.start()
    torch.tanh(one)
    profiler.start()
    one @ one
    profiler.stop(file)
    assert "aten::mm" in event_names(file)
    assert "aten::tanh" not in event_names(file)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    with pytest.raises(InputError) as caught:
        profiler.stop(file)
    assert caught.value.name == f"trace for {file}"


def test_scores_of_a_reference_that_was_never_saved_are_refused(batch):
    policy = PolicyRank.__new__(PolicyRank)
    policy._reference = None
    with pytest.raises(InputError) as caught:
        policy.compute_log_probs(batch, True)
    assert (caught.value.name, caught.value.got) == ("reference of the log-probs", None)


def test_a_given_reference_stays_that_model_whatever_the_policy_does(run, batch, tmp_path):
    other = str(make_tiny_model("qwen3", tmp_path, seed=9, tied=True, num_hidden_layers=2))
    calls = [
        ("compute_log_probs", batch),
        ("compute_log_probs", batch, True),
        ("sft_step", batch, LR),
        ("reset_optimizer",),
        ("set_objective", AlgoConfig(kl_coef=0.3), 1.0),
        ("compute_log_probs", batch, True),
    ]
    ranks = run(calls, {"data": 2, "tensor": 2}, algo__kl_coef=0.1, model__reference_path=other)
    own, given, later = (
        scores_by_row([rank[call] for rank in ranks], batch)[0] for call in (0, 1, 5)
    )
    ((expected, *_),) = run([("compute_log_probs", batch)], model__path=other)
    assert torch.equal(given, later)
    assert torch.allclose(given, scores_by_row([expected], batch)[0], atol=1e-4)
    assert not torch.allclose(own, given, atol=1e-2)


def test_a_users_fields_reach_megatrons_model_and_optimizer(checkpoints, train_config, lone_rank):
    config = train_config(checkpoints[True])
    config.model.megatron = {"attention_softmax_in_fp32": False}
    config.optim.megatron = {"adam_eps": 0.5}
    policy = PolicyRank(config, lone_rank)
    try:
        model = policy.megatron_model
        assert [chunk.config.attention_softmax_in_fp32 for chunk in model.chunks] == [False]
        assert {group["eps"] for group in model.optimizer._optimizer.param_groups} == {0.5}
    finally:
        policy.close()


def test_a_run_that_only_evaluates_has_no_optimizer(checkpoints, train_config, lone_rank):
    config = train_config(checkpoints[True])
    config.total_steps, config.algo.kl_coef = 0, 0.1
    policy = PolicyRank(config, lone_rank)
    try:
        policy.load_hf(str(checkpoints[True]))
        assert not policy.megatron_model.is_trainable
        parameters = policy.megatron_model.parameters.values()
        assert not any(parameter.requires_grad for parameter in parameters)
        before = policy.compute_prompt_log_probs([1, 2, 3])
        assert before is not None
        policy.set_gpu_resident(frozenset())
        with pytest.raises(InputError) as caught:
            policy.compute_prompt_log_probs([1, 2, 3])
        assert caught.value.got == ["weights"]
        policy.set_gpu_resident({"weights"})
        assert policy.compute_prompt_log_probs([1, 2, 3]) == before
    finally:
        policy.close()


def test_another_objective_starts_from_the_weights_it_finds(run, batch):
    calls = [
        ("sft_step", batch, LR),
        ("set_objective", AlgoConfig(kl_coef=0.3), 0.5),
        ("compute_log_probs", batch),
        ("compute_log_probs", batch, True),
        ("update", batch, None, 0.0),
        ("sft_step", batch, LR),
        ("compute_log_probs", batch, True),
        ("set_objective", AlgoConfig(), 1.0),
        ("update", batch, None, 0.0),
    ]
    ((_, _, cool, start, with_kl, _, kept, _, without),) = run(calls)
    assert torch.equal(start[1], cool[1])
    assert torch.equal(kept[1], start[1])
    assert with_kl.loss == pytest.approx(
        with_kl.metrics["policy_loss"] + 0.3 * with_kl.metrics["ref_kl"]
    )
    assert with_kl.metrics["ref_kl"] > 0
    assert without.loss == pytest.approx(without.metrics["policy_loss"])


def test_a_run_resumed_under_another_objective_has_the_reference_of_the_start(run, batch, tmp_path):
    """Start, train, save; then, like a new run, start, set the objective and load."""
    start, later = str(tmp_path / "start"), str(tmp_path / "later")
    objective = ("set_objective", AlgoConfig(kl_coef=0.1), 1.0)
    scores = [("compute_log_probs", batch), ("compute_log_probs", batch, True)]
    calls = [
        ("save", start, {"step": 0}, 2),
        objective,
        ("sft_step", batch, LR),
        *scores,
        ("save", later, {"step": 1}, 2),
        ("load_checkpoint", start),
        objective,
        ("load_checkpoint", later),
        *scores,
    ]
    ((_, _, _, present, reference, _, zero, _, one, again, its_reference),) = run(calls)
    assert (zero, one) == ({"step": 0}, {"step": 1})
    assert torch.equal(again[1], present[1])
    assert torch.equal(its_reference[1], reference[1])
    assert not torch.equal(present[1], reference[1])


def test_parallel_sizes_that_do_not_divide_the_model_are_refused(checkpoints, train_config):
    config = train_config(checkpoints[True], tensor=3)
    rank_info = RankInfo(rank=0, world_size=3, master_address="", master_port=0, timeout_s=1.0)
    with pytest.raises(ValueError):
        PolicyRank(config, rank_info)
