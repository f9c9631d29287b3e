"""Rewards that come later: overlapped with the log-prob pass, masked where there is none, a model's
part over the packed batch."""

from dataclasses import replace

import pytest
import torch

from mega_agentrl.batch.pack import pack
from mega_agentrl.config.reward_schema import RewardConfig, RewardModelConfig
from mega_agentrl.reward.rubric import WeightedRubric
from mega_agentrl.rollout.collected import Collected
from mega_agentrl.rollout.filter import Verdict
from mega_agentrl.rollout.scoring import start_scores
from mega_agentrl.rollout.tree_file import read_trees, write_trees
from mega_agentrl.runtime.rewards import open_rubric
from mega_agentrl.train.phases import collect_groups, open_groups
from mega_agentrl.train.rewards import add_model_scores, settle_rewards
from mega_agentrl.types.records import (
    Author,
    Restart,
    RolloutTree,
    Score,
    StopReason,
    Trajectory,
    Turn,
)
from tests.fakes import make_prompt

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


def row(name, prompt, text="\\boxed{1}", **changes):
    values = {
        "trajectory_id": name,
        "prompt": prompt,
        "path": (0,),
        "token_ids": [1, 2],
        "loss_mask": [1, 1],
        "logps": [-1.0, -1.0],
        "entropies": [1.0, 1.0],
        "versions": [0, 0],
        "turn_ids": [0, 0],
        "turns": [Turn(index=0, author=Author.assistant, start=0, stop=2, text=text)],
        "stop_reason": StopReason.eos,
    }
    return Trajectory(**(values | changes))


def collected_of(trees, rubric):
    pending = [one for tree in trees for one in start_scores(tree, rubric)]
    return Collected(
        trees=trees,
        seen=trees,
        verdicts=[Verdict.kept] * len(trees),
        version=0,
        counts={},
        pending=pending,
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
        environment=["GATE"],
        workers=2,
        deadline_s=120.0,
    )


def test_the_log_prob_pass_runs_while_a_function_is_busy(parts, config, gate, gated):
    """The function returns when the pass has run, and not before."""

    def opens(batch, plain=parts.policy.add_logprobs):
        assert batch.reward_B.isnan().all(), "no reward can be there yet"
        batch = plain(batch)
        gate.touch()
        return batch

    parts.policy.add_logprobs = opens
    with open_rubric(gated) as parts.rubric, open_groups(parts, config) as groups:
        collected = collect_groups(parts, groups, 1)
        batch = pack(collected.trees)
        batch = parts.policy.add_logprobs(batch)
        collected, batch = settle_rewards(parts, collected, batch)
    trajectories = [one for tree in collected.trees for one in tree.trajectories]
    assert len(trajectories) == batch.num_rows
    for one, reward in zip(trajectories, batch.reward_B.tolist(), strict=True):
        assert one.score.parts["gated"] == 1.0
        assert one.score.value == reward == 1.0 + one.score.parts["accuracy"]
        assert one.score.fields["gated"]["length"] == len(one.response_text)


def test_functions_that_hang_or_die_mask_their_trajectory(parts, gate, gated, caplog, tmp_path):
    gate.touch()
    prompt = make_prompt()
    texts = ["good \\boxed{1}", "hang", "die", "good \\boxed{2}"]
    rows = [row(f"t{index}", prompt, text) for index, text in enumerate(texts)]
    trees = [RolloutTree(prompt=prompt, trajectories=rows)]
    with open_rubric(replace(gated, deadline_s=2.0)) as rubric:
        collected = collected_of(trees, rubric)
        batch = pack(trees)
        collected, batch = settle_rewards(parts, collected, batch)
    assert batch.reward_B.tolist() == [2.0, 0.0, 0.0, 1.0]
    assert batch.mask_BT.any(dim=1).tolist() == [True, False, False, True]
    assert batch.group_B.tolist() == [0, 1, 2, 0]
    assert "did not return within 2 s" in rows[1].no_reward
    assert "exit code 9" in rows[2].no_reward
    assert "2 trajectories have no reward and are not trained on; the first, t1" in caplog.text
    assert collected.metrics()["rollout/reward_seen"] == 1.5
    write_trees(tmp_path / "trees.jsonl", trees, stage="rl", step=1)
    (stored,) = read_trees(tmp_path / "trees.jsonl")
    assert stored.tree.leaves[0].facts["score"].fields == {"gated": {"length": 14, "said": "good "}}
    assert "exit code 9" in stored.tree.leaves[2].facts["no_reward"]


class Model:
    """A reward model that says the number of a row's tokens, or what it is told for it."""

    def __init__(self, odd=None):
        self.odd, self.batches = odd or {}, []

    def scores(self, batch):
        self.batches.append(batch)
        said = [float(length) for length in batch.length_B]
        return torch.tensor([self.odd.get(index, value) for index, value in enumerate(said)])


JUDGED = RewardConfig(
    rubric={"judged": {"accuracy": 1.0, "model": 0.5}, "default": {"accuracy": 1.0}},
    model=RewardModelConfig("folder"),
)


def test_a_models_part_is_added_where_the_rubric_has_it(parts):
    parts.rubric, parts.reward_model = WeightedRubric(JUDGED), Model({3: float("nan")})
    judged, plain = make_prompt("a", data_source="judged"), make_prompt("b")
    restarts = (Restart(start=2, token_ids=(7,)),)
    longer = {name: [1] * 5 for name in ("token_ids", "loss_mask", "versions")}
    longer |= {name: [0.0] * 5 for name in ("logps", "entropies")} | {"turn_ids": [0] * 5}
    trees = [
        RolloutTree(
            prompt=judged,
            trajectories=[
                row("two rows", judged, restarts=restarts, **longer),
                row("failed", judged, stop_reason=StopReason.aborted),
                row("nan", judged),
            ],
        ),
        RolloutTree(prompt=plain, trajectories=[row("plain", plain)]),
    ]
    collected = collected_of(trees, parts.rubric)
    _, batch = settle_rewards(parts, collected, pack(trees))
    # The first trajectory is two rows, of 2 and of 3 tokens: the last one counts.
    assert batch.reward_B.tolist() == [2.5, 2.5, 0.0, 0.0, 1.0]
    first, _, odd = trees[0].trajectories
    assert first.score.parts == {"accuracy": 1.0, "model": 1.5}
    assert odd.no_reward == "the reward model gave nan" and odd.score is None
    assert trees[1].trajectories[0].score.parts == {}
    assert len(parts.reward_model.batches) == 1


def test_filtered_groups_are_scored_as_well_and_others_not_read(parts):
    parts.rubric, parts.reward_model = WeightedRubric(JUDGED), Model()
    judged, plain = make_prompt("a", data_source="judged"), make_prompt("b")
    trees = [
        RolloutTree(prompt=prompt, trajectories=[row(prompt.prompt_id, prompt)])
        for prompt in (judged, judged, plain)
    ]
    seen = collected_of(trees, parts.rubric)
    some = Collected(
        trees=trees[:1],
        seen=trees,
        verdicts=[Verdict.kept, Verdict.low, Verdict.low],
        version=0,
        counts={},
        pending=seen.pending,
    )
    _, batch = settle_rewards(parts, some, pack(trees[:1]))
    assert batch.reward_B.tolist() == [2.0]
    assert trees[1].trajectories[0].score.value == 2.0
    assert trees[2].trajectories[0].score.value == 1.0
    (read,) = parts.reward_model.batches
    assert read.num_rows == 2
    add_model_scores(parts, trees[2:])
    assert len(parts.reward_model.batches) == 1


def test_with_nothing_missing_the_batch_is_as_it_was(parts):
    prompt = make_prompt()
    one = row("a", prompt)
    one.score = Score(value=0.5, correct=False, f1=0.0, answer="", reason="")
    trees = [RolloutTree(prompt=prompt, trajectories=[one])]
    before = pack(trees)
    none = Collected(trees=trees, seen=trees, verdicts=[Verdict.kept], version=0, counts={})
    _, after = settle_rewards(parts, none, before)
    assert torch.equal(after.reward_B, before.reward_B)
    assert torch.equal(after.mask_BT, before.mask_BT)
