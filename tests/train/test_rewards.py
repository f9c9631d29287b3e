"""Rewards that come later: overlapped with the log-prob pass, masked where there is none, a model's
part over the packed batch."""

from dataclasses import replace

import pytest
import torch

from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.config.sections.reward import RewardConfig, RewardModelConfig
from mega_agentrl.reward.rubric import WeightedRubric
from mega_agentrl.rollout.groups.batch_collector import RolloutBatch
from mega_agentrl.rollout.groups.filter import FilterResult
from mega_agentrl.rollout.groups.scoring import start_scores
from mega_agentrl.rollout.io.tree_file import read_trees, write_trees
from mega_agentrl.runtime.rubric import open_rubric
from mega_agentrl.train.rewards import RewardResolver, add_reward_model_scores
from mega_agentrl.train.scheduler import open_rollout_scheduler
from mega_agentrl.train.signals import SignalHandler
from mega_agentrl.types.records import ContextReset, Role, RolloutTree, StopReason
from tests.fakes import FakeRubric, make_prompt, make_trajectory

GATED = """
import os, time, pathlib

def compute_score(data_source, solution_str, ground_truth, extra_info):
    gate = pathlib.Path(os.environ["GATE"])
    if "hang" in solution_str:
        time.sleep(600)
    if "die" in solution_str:
        os._exit(9)
    while not gate.exists():
        time.sleep(0.01)
    return {"score": 2.0, "length": len(solution_str), "said": solution_str[:5]}
"""


def row(name, prompt, text="\\boxed{1}", *, size=2, **changes):
    """A trajectory of one turn of `size` tokens."""
    spans = [(Role.assistant, size)]
    one = make_trajectory((0,), spans, trajectory_id=name, prompt=prompt, **changes)
    one.turns[0] = replace(one.turns[0], text=text)
    return one


def rollout_batch_of(trees, rubric, *, num_accepted=None):
    """The batch of the first trees; the others, and their scores, are of filtered groups."""
    accepted = trees[:num_accepted]
    results = [FilterResult.below_range] * len(trees)
    results[: len(accepted)] = [FilterResult.accepted] * len(accepted)
    return RolloutBatch(
        trees=accepted,
        finished_trees=trees,
        filter_results=results,
        version=0,
        group_counts={},
        pending_scores=[one for tree in trees for one in start_scores(tree, rubric)],
    )


@pytest.fixture
def gate(tmp_path, monkeypatch):
    monkeypatch.setenv("GATE", str(tmp_path / "open"))
    return tmp_path / "open"


@pytest.fixture
def gated(tmp_path, gate):
    (tmp_path / "gated.py").write_text(GATED)
    return RewardConfig(
        rubric={"default": {"accuracy": 1.0, "gated": 0.5}},
        functions={"gated": f"{tmp_path}/gated.py"},
        worker_env_vars=["GATE"],
        num_workers=2,
        timeout_s=120.0,
    )


def test_the_log_prob_pass_runs_while_a_function_is_busy(components, config, gate, gated):
    """The function returns when the pass has run, and not before."""

    def opens(batch, plain=components.policy.compute_log_probs):
        assert batch.reward_B.isnan().all(), "no reward can be there yet"
        batch = plain(batch)
        gate.touch()
        return batch

    components.policy.compute_log_probs = opens
    with (
        open_rubric(gated) as components.rubric,
        open_rollout_scheduler(components, config, SignalHandler()) as scheduler,
    ):
        rollout_batch = scheduler.collect(1)
        batch = pack_trees(rollout_batch.trees)
        batch = components.policy.compute_log_probs(batch)
        batch = RewardResolver(components).resolve(rollout_batch, batch)
    trajectories = [one for tree in rollout_batch.trees for one in tree.trajectories]
    assert len(trajectories) == batch.num_rows
    for one, reward in zip(trajectories, batch.reward_B.tolist(), strict=True):
        assert one.score.parts["gated"] == 1.0
        assert one.score.value == reward == 1.0 + one.score.parts["accuracy"]
        assert one.score.extra_info["gated"]["length"] == len(one.response_text)


def test_functions_that_hang_or_die_mask_their_trajectory(
    components, gate, gated, caplog, tmp_path
):
    gate.touch()
    prompt = make_prompt()
    texts = ["good \\boxed{1}", "hang", "die", "good \\boxed{2}"]
    rows = [row(f"t{index}", prompt, text) for index, text in enumerate(texts)]
    trees = [RolloutTree(prompt=prompt, trajectories=rows)]
    with open_rubric(replace(gated, timeout_s=5.0)) as rubric:
        rollout_batch = rollout_batch_of(trees, rubric)
        batch = pack_trees(trees)
        batch = RewardResolver(components).resolve(rollout_batch, batch)
    assert batch.reward_B.tolist() == [2.0, 0.0, 0.0, 1.0]
    assert batch.mask_BT.any(dim=1).tolist() == [True, False, False, True]
    assert batch.group_B.tolist() == [0, 1, 2, 0]
    assert "within 5 s" in rows[1].reward_error and "exit code 9" in rows[2].reward_error
    assert "2 trajectories" in caplog.text and "t1" in caplog.text
    assert rollout_batch.metrics()["rollout/reward_unfiltered"] == 1.5
    write_trees(tmp_path / "trees.jsonl", trees, stage="rl", step=1)
    (stored,) = read_trees(tmp_path / "trees.jsonl")
    good, _, died, _ = (leaf.record_fields for leaf in stored.tree.leaves)
    assert good["score"].extra_info == {"gated": {"length": 14, "said": "good "}}
    assert died["reward_error"] == rows[2].reward_error


class Model:
    """A reward model that says the number of a row's tokens, or what it is told for it."""

    def __init__(self, odd=None):
        self.odd, self.batches = odd or {}, []

    def compute_scores(self, batch):
        self.batches.append(batch)
        scores = [float(length) for length in batch.length_B]
        return torch.tensor([self.odd.get(index, value) for index, value in enumerate(scores)])


JUDGED = RewardConfig(
    rubric={"judged": {"accuracy": 1.0, "model": 0.5}, "default": {"accuracy": 1.0}},
    model=RewardModelConfig("folder"),
)


def test_a_models_part_is_added_where_the_rubric_has_it(components):
    components.rubric, components.reward_model = WeightedRubric(JUDGED), Model({3: float("nan")})
    judged, plain = make_prompt("a", data_source="judged"), make_prompt("b")
    context_resets = (ContextReset(start=2, token_ids=(7,)),)
    trees = [
        RolloutTree(
            prompt=judged,
            trajectories=[
                row("two rows", judged, size=5, context_resets=context_resets),
                row("failed", judged, stop_reason=StopReason.aborted),
                row("nan", judged),
            ],
        ),
        RolloutTree(prompt=plain, trajectories=[row("plain", plain)]),
    ]
    rollout_batch = rollout_batch_of(trees, components.rubric)
    batch = RewardResolver(components).resolve(rollout_batch, pack_trees(trees))
    # The first trajectory is two rows, of 2 and of 3 tokens: the last one counts.
    assert batch.reward_B.tolist() == [2.5, 2.5, 0.0, 0.0, 1.0]
    first, _, odd = trees[0].trajectories
    assert first.score.parts == {"accuracy": 1.0, "model": 1.5}
    assert "nan" in odd.reward_error and odd.score is None
    assert trees[1].trajectories[0].score.parts == {}
    assert len(components.reward_model.batches) == 1


def test_filtered_groups_are_scored_as_well_and_others_not_read(components):
    components.rubric, components.reward_model = WeightedRubric(JUDGED), Model()
    judged, plain = make_prompt("a", data_source="judged"), make_prompt("b")
    trees = [
        RolloutTree(prompt=prompt, trajectories=[row(prompt.prompt_id, prompt)])
        for prompt in (judged, judged, plain)
    ]
    some = rollout_batch_of(trees, components.rubric, num_accepted=1)
    batch = RewardResolver(components).resolve(some, pack_trees(trees[:1]))
    assert batch.reward_B.tolist() == [2.0]
    assert trees[1].trajectories[0].score.value == 2.0
    assert trees[2].trajectories[0].score.value == 1.0
    (read,) = components.reward_model.batches
    assert read.num_rows == 2
    add_reward_model_scores(components, trees[2:])
    assert len(components.reward_model.batches) == 1


def test_a_batch_with_all_rewards_is_unchanged(components):
    prompt = make_prompt()
    trees = [RolloutTree(prompt=prompt, trajectories=[row("a", prompt)])]
    rollout_batch = rollout_batch_of(trees, FakeRubric())
    before = pack_trees(trees)
    after = RewardResolver(components).resolve(rollout_batch, before)
    assert torch.equal(after.reward_B, before.reward_B)
    assert torch.equal(after.mask_BT, before.mask_BT)
