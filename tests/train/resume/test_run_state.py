"""A run's state: there and back through a checkpoint folder, what is kept."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.actor.checkpoint.checkpoint_dir import MANIFEST_FILE
from mega_agentrl.data.prompt_sampler import PromptSampler
from mega_agentrl.train.resume import run_state
from mega_agentrl.train.resume.run_state import RunState
from tests.fakes import make_prompt
from tests.train.file_policy import WEIGHT, FilePolicy


def newest(run_dir):
    return next(iter(run_state.valid_checkpoints(run_dir)), None)


def state_at(step, **changes):
    values = {
        "step": step,
        "controller_state": {"beta": 0.1 + 0.2, "seen": {"p1": [0.5, 3]}},
        "sampler_state": {"position": 3 * step},
    }
    return RunState(**(values | changes))


@given(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False)))
def test_json_gives_back_the_same_values(controllers):
    state = state_at(3, controller_state=controllers)
    assert RunState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plain: plain.pop("sampler_state"), "got keys .*expected .*'sampler_state'"),
        (lambda plain: plain.update(more=1), "got keys .*'more'"),
    ],
    ids=["missing", "unknown"],
)
def test_what_is_no_state_is_refused(change, message):
    plain = state_at(1).to_dict()
    change(plain)
    with pytest.raises(ValueError, match=message):
        RunState.from_dict(plain)


def test_the_two_newest_stay_and_the_newest_is_taken_up(tmp_path):
    assert newest(tmp_path) is None
    for step in (2, 4, 6):
        run_state.save_checkpoint(FilePolicy(step / 10), tmp_path, state_at(step))
    found = newest(tmp_path)
    assert found == tmp_path / "checkpoints" / "step-000006"
    assert len(list(found.parent.iterdir())) == run_state.MAX_CHECKPOINTS == 2
    policy = FilePolicy(0.0)
    assert run_state.load_checkpoint(policy, found) == state_at(6)
    assert policy.weight == 0.6


def test_a_save_cut_short_before_its_manifest_does_not_count(tmp_path):
    run_state.save_checkpoint(FilePolicy(0.2), tmp_path, state_at(2))
    cut = run_state.save_checkpoint(FilePolicy(0.4), tmp_path, state_at(4))
    (cut / MANIFEST_FILE).unlink()
    assert newest(tmp_path).name == "step-000002"
    run_state.save_checkpoint(FilePolicy(0.4), tmp_path, state_at(4))
    assert newest(tmp_path).name == "step-000004"


def test_a_damaged_one_is_passed_over_and_written_anew(tmp_path):
    run_state.save_checkpoint(FilePolicy(0.2), tmp_path, state_at(2))
    damaged = run_state.save_checkpoint(FilePolicy(0.4), tmp_path, state_at(4))
    (damaged / WEIGHT).write_text("")
    assert newest(tmp_path).name == "step-000002"
    run_state.save_checkpoint(FilePolicy(0.5), tmp_path, state_at(4))
    policy = FilePolicy(0.0)
    assert run_state.load_checkpoint(policy, newest(tmp_path)) == state_at(4)
    assert policy.weight == 0.5


def test_a_whole_one_is_never_written_over(tmp_path):
    run_state.save_checkpoint(FilePolicy(0.2), tmp_path, state_at(2))
    with pytest.raises(ValueError, match="there is a finished checkpoint"):
        run_state.save_checkpoint(FilePolicy(0.4), tmp_path, state_at(2))


def test_a_checkpoint_of_something_else_changes_nothing(tmp_path):
    FilePolicy(0.5).save_checkpoint(tmp_path / "checkpoints" / "other", {"answer": 42})
    policy = FilePolicy(0.0)
    with pytest.raises(ValueError, match="without a run's state"):
        run_state.load_checkpoint(policy, newest(tmp_path))
    assert policy.weight == 0.0


def test_a_restored_sampler_goes_on_where_it_was(tmp_path):
    prompts = [make_prompt(f"p{number}") for number in range(7)]
    sampler = PromptSampler(prompts, seed=3)
    sampler.ack(sampler.next_prompts(5))
    run_state.save_checkpoint(
        FilePolicy(0.0), tmp_path, state_at(1, sampler_state=sampler.state_dict())
    )
    expected = [one.prompt_id for one in sampler.next_prompts(6)]
    resumed = PromptSampler(prompts, seed=3)
    resumed.load_state_dict(
        run_state.load_checkpoint(FilePolicy(0.0), newest(tmp_path)).sampler_state
    )
    assert [one.prompt_id for one in resumed.next_prompts(6)] == expected


def test_steps_behind_the_checkpoint_are_forgotten(tmp_path):
    assert run_state.truncate_metrics(tmp_path, 0) == 0
    records = [{"stage": "sft", "step": 9}, *({"stage": "rl", "step": n} for n in range(1, 5))]
    path = tmp_path / "metrics.jsonl"
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_text(text + '{"stage": "rl", "st')
    assert run_state.truncate_metrics(tmp_path, 2) == 3
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert kept == records[:3]
    assert run_state.truncate_metrics(tmp_path, 2) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_validation_before_rl_is_kept_only_if_the_checkpoint_has_it(tmp_path):
    stages = [("sft", 9), ("held_out_before", 0), ("rl", 1), ("held_out_after", 1)]
    text = "".join(json.dumps({"stage": stage, "step": step}) + "\n" for stage, step in stages)
    path = tmp_path / "metrics.jsonl"
    for step, is_evaluated, expected in [(1, True, 3), (0, True, 2), (0, False, 1)]:
        path.write_text(text)
        assert (
            run_state.truncate_metrics(tmp_path, step, has_validation_before=is_evaluated)
            == 4 - expected
        )
        assert path.read_text() == "".join(text.splitlines(keepends=True)[:expected])


def test_of_the_same_policy_only_the_rest_is_written_anew(tmp_path):
    folder = run_state.save_checkpoint(FilePolicy(0.25), tmp_path, state_at(2))
    with pytest.raises(ValueError, match="there is a finished checkpoint"):
        run_state.save_checkpoint(FilePolicy(0.5), tmp_path, state_at(2))
    later = state_at(2, last_validated_step=2)
    assert run_state.save_checkpoint(FilePolicy(0.5), tmp_path, later, same_policy=True) == folder
    policy = FilePolicy(0.0)
    assert run_state.load_checkpoint(policy, folder) == later
    assert policy.weight == 0.25


def test_validations_within_rl_are_kept_up_to_the_last_of_the_checkpoint(tmp_path):
    records = [("rl", 2), ("held_out_during", 2), ("rl", 4), ("held_out_during", 4), ("rl", 5)]
    lines = [json.dumps({"stage": stage, "step": step}) + "\n" for stage, step in records]
    path = tmp_path / "metrics.jsonl"
    for step, last_step, expected in [(5, 4, 5), (4, 4, 4), (4, 2, 3), (2, 2, 2), (2, 0, 1)]:
        path.write_text("".join(lines))
        run_state.truncate_metrics(tmp_path, step, last_validated_step=last_step)
        assert path.read_text() == "".join(lines[:expected])


def test_the_start_is_the_last_to_go_on_from_and_is_not_removed(tmp_path):
    assert run_state.valid_checkpoints(tmp_path) == []
    run_state.save_checkpoint(
        FilePolicy(0.0), tmp_path, state_at(0), keep=1, name=run_state.WARM_START_DIR
    )
    for step in (2, 4, 6):
        run_state.save_checkpoint(FilePolicy(step / 10), tmp_path, state_at(step))
    assert [
        path.relative_to(tmp_path).as_posix() for path in run_state.valid_checkpoints(tmp_path)
    ] == [
        "checkpoints/step-000006",
        "checkpoints/step-000004",
        "start/step-000000",
    ]


def test_damaged_ones_are_named_and_the_next_is_taken(tmp_path, caplog):
    for step in (2, 4):
        run_state.save_checkpoint(FilePolicy(step / 10), tmp_path, state_at(step))
    folder_4 = newest(tmp_path)
    (folder_4 / WEIGHT).write_text("0.9")  # as long as it was
    policy = FilePolicy(0.0)
    folder, state = run_state.load_newest_checkpoint(policy, run_state.valid_checkpoints(tmp_path))
    assert (folder.name, state.step, policy.weight) == ("step-000002", 2, 0.2)
    assert f"{folder_4} is skipped" in caplog.text
    # It is no checkpoint any more: the step can be saved again.
    run_state.save_checkpoint(FilePolicy(0.5), tmp_path, state_at(4))
    assert newest(tmp_path) == folder_4
    (folder_4 / WEIGHT).write_text("")
    assert run_state.valid_checkpoints(tmp_path) == [folder]
    assert f"{folder_4} is damaged" in caplog.text


def test_a_failure_without_damage_condemns_no_checkpoint(tmp_path):
    class DeafPolicy(FilePolicy):
        def load_checkpoint(self, folder):
            raise RuntimeError("policy resume: no answer within 600 s from policy rank 1")

    run_state.save_checkpoint(FilePolicy(0.2), tmp_path, state_at(2))
    with pytest.raises(RuntimeError, match="no answer"):
        run_state.load_newest_checkpoint(DeafPolicy(), run_state.valid_checkpoints(tmp_path))
    assert newest(tmp_path) is not None
    assert run_state.load_newest_checkpoint(DeafPolicy(), []) is None


def test_an_interrupted_warm_start_has_its_own_name_and_comes_last(tmp_path):
    progress = {"step": 7, "loss": 0.5, "grad_norm": 1.0, "num_tokens": 3}
    stopped = state_at(0, warm_start_progress=progress)
    run_state.save_checkpoint(FilePolicy(0.1), tmp_path, stopped)
    (folder,) = run_state.valid_checkpoints(tmp_path)
    assert folder.name == "warm-000007" and run_state.is_mid_warm_start(folder)
    assert run_state.load_checkpoint(FilePolicy(), folder) == stopped
    run_state.save_checkpoint(
        FilePolicy(0.2), tmp_path, state_at(0), keep=1, name=run_state.WARM_START_DIR
    )
    assert [path.parent.name for path in run_state.valid_checkpoints(tmp_path)] == [
        "start",
        "checkpoints",
    ]


def test_supervised_steps_that_are_repeated_are_removed(tmp_path):
    records = [{"stage": "sft", "step": step} for step in (1, 2, 3)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert run_state.truncate_metrics(tmp_path, 0) == 0
    assert run_state.truncate_metrics(tmp_path, 0, sft_steps=1) == 2
    assert [json.loads(line) for line in path.read_text().splitlines()] == records[:1]
