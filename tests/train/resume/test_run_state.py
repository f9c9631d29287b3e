"""A run's state: there and back through a checkpoint folder, what is kept."""

import json
from dataclasses import replace

import pytest

from mega_agentrl.actor.checkpoint.checkpoint_dir import MANIFEST_FILE
from mega_agentrl.algo.ares import AresState
from mega_agentrl.algo.mastery import MasteryState
from mega_agentrl.data.prompt_sampler import PromptSampler
from mega_agentrl.report.reward_curve import EvalPoint, StepPoint
from mega_agentrl.train.controllers import Controllers
from mega_agentrl.train.evaluate import EvalResult, ValidationResult
from mega_agentrl.train.resume import run_state
from mega_agentrl.train.resume.pending_checkpoint import ModelSave, PendingCheckpoint
from mega_agentrl.train.resume.run_state import RunState
from mega_agentrl.train.run_logger import LoggerState
from mega_agentrl.train.warm_start import WarmStartProgress
from mega_agentrl.types.serialization import from_builtins, to_builtins
from tests.fakes import make_prompt
from tests.through_json import through_json
from tests.train.file_policy import WEIGHT, FilePolicy


def newest(run_dir):
    return next(iter(run_state.valid_checkpoints(run_dir)), None)


def state_at(step, **changes):
    values = {
        "step": step,
        "controllers": Controllers(
            ares=AresState(difficulty_by_prompt={"p1": 2}, alphas=(0.1 + 0.2, 1 / 3, 0.5)),
            mastery=MasteryState(correct_streaks={"p1": 3}, last_entropies={"p1": 0.1}),
        ),
        "sampler_state": {"position": 3 * step},
    }
    return RunState(**(values | changes))


def save_warm_start(run_dir):
    options = {"keep": 1, "name": run_state.WARM_START_DIR}
    run_state.save_checkpoint(FilePolicy(0.0), run_dir, state_at(0), **options)


def test_json_gives_back_the_same_values():
    sampled = EvalResult(
        num_questions=2,
        num_samples=4,
        reward=0.1 + 0.2,
        reward_se=0.0,
        success=1 / 3,
        reward_by_source={"a": -1.5},
        success_by_source={},
        metrics={"rollout/x": 5e-324},
        pass_at_k={"pass@2": 1.0},
        question_means={"": {"a/1": (1 / 3, 0.0)}},
    )
    state = state_at(
        3,
        weight_version=5,
        logger_state=LoggerState(
            step_points=(StepPoint(step=1, reward=1 / 3, success=0.0),),
            eval_points=(EvalPoint(step=1, reward=0.5, success=1.0),),
            logprob_mismatches=(0.1, float("inf")),
            stage_s={"RL": 1.5},
        ),
        validation_before=ValidationResult(sampled=sampled, greedy=None),
        warm_start_progress=WarmStartProgress(step=7, loss=0.5, grad_norm=1.0, num_tokens=3),
        last_validated_step=2,
    )
    assert through_json(state) == state


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda plain: plain.pop("sampler_state"), "sampler_state"),
        (lambda plain: plain.update(more=1), "more"),
    ],
    ids=["missing", "unknown"],
)
def test_a_malformed_state_is_refused(change, key):
    plain = to_builtins(state_at(1))
    change(plain)
    with pytest.raises(ValueError) as caught:
        from_builtins(RunState, plain, "state")
    assert key in str(caught.value)


def test_a_checkpoint_of_a_version_with_fewer_fields_is_read():
    plain = to_builtins(state_at(1))
    del plain["last_validated_step"], plain["logger_state"]["unwritten_line"]
    assert from_builtins(RunState, plain, "state") == replace(state_at(1), last_validated_step=0)


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


def test_a_damaged_checkpoint_is_passed_over_and_written_anew(tmp_path):
    run_state.save_checkpoint(FilePolicy(0.2), tmp_path, state_at(2))
    damaged = run_state.save_checkpoint(FilePolicy(0.4), tmp_path, state_at(4))
    (damaged / WEIGHT).write_text("")
    assert newest(tmp_path).name == "step-000002"
    run_state.save_checkpoint(FilePolicy(0.5), tmp_path, state_at(4))
    policy = FilePolicy(0.0)
    assert run_state.load_checkpoint(policy, newest(tmp_path)) == state_at(4)
    assert policy.weight == 0.5


def test_a_checkpoint_without_a_run_state_is_refused_before_the_policy_loads(tmp_path):
    folder = tmp_path / "checkpoints" / "other"
    PendingCheckpoint(0, [ModelSave(FilePolicy(0.5), folder, {"answer": 42}, None)]).commit()
    policy = FilePolicy(0.0)
    with pytest.raises(ValueError):
        run_state.load_checkpoint(policy, newest(tmp_path))
    assert policy.weight == 0.0


def test_a_restored_sampler_goes_on_where_it_was(tmp_path):
    prompts = [make_prompt(f"p{number}") for number in range(7)]
    sampler = PromptSampler(prompts, seed=3)
    sampler.ack(sampler.next_prompts(5))
    state = state_at(1, sampler_state=sampler.state_dict())
    run_state.save_checkpoint(FilePolicy(0.0), tmp_path, state)
    expected = [one.prompt_id for one in sampler.next_prompts(6)]
    resumed = PromptSampler(prompts, seed=3)
    restored = run_state.load_checkpoint(FilePolicy(0.0), newest(tmp_path))
    resumed.load_state_dict(restored.sampler_state)
    assert [one.prompt_id for one in resumed.next_prompts(6)] == expected


@pytest.mark.parametrize(
    ("lines", "arguments", "num_kept"),
    [
        ("sft 9, rl 1, rl 2, rl 3, rl 4", {"step": 2}, 3),
        ("sft 9, before 0, rl 1, after 1", {"step": 1}, 3),
        ("sft 9, before 0, rl 1, after 1", {"step": 0}, 2),
        ("sft 9, before 0, rl 1, after 1", {"step": 0, "has_validation_before": False}, 1),
        ("rl 2, during 2, rl 4, during 4, rl 5", {"step": 5, "last_validated_step": 4}, 5),
        ("rl 2, during 2, rl 4, during 4, rl 5", {"step": 4, "last_validated_step": 4}, 4),
        ("rl 2, during 2, rl 4, during 4, rl 5", {"step": 4, "last_validated_step": 2}, 3),
        ("rl 2, during 2, rl 4, during 4, rl 5", {"step": 2, "last_validated_step": 2}, 2),
        ("rl 2, during 2, rl 4, during 4, rl 5", {"step": 2, "last_validated_step": 0}, 1),
        ("sft 1, sft 2, sft 3", {"step": 0}, 3),
        ("sft 1, sft 2, sft 3", {"step": 0, "sft_steps": 1}, 1),
    ],
)
def test_metrics_behind_the_checkpoint_are_forgotten(tmp_path, lines, arguments, num_kept):
    written = []
    for line in lines.split(", "):
        stage, number = line.split()
        stage = stage if stage in ("sft", "rl") else f"held_out_{stage}"
        written.append(json.dumps({"stage": stage, "step": int(number)}) + "\n")
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(written) + '{"stage": "rl", "st')
    num_removed = len(written) + 1 - num_kept
    assert run_state.truncate_metrics(tmp_path, **arguments) == num_removed
    assert path.read_text() == "".join(written[:num_kept])
    assert run_state.truncate_metrics(tmp_path, **arguments) == 0
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "damage",
    [
        b"\0" * 40 + b"\n",
        b'{"stage": "rl", "st\n',
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b'{"stage": 3, "step": 1}\n',
        b'{"stage": "rl", "step": "x"}\n',
        b'{"stage": "rl"}\n',
        b"7\n",
    ],
    ids=["NUL", "half", "no UTF-8", "depth", "stage", "step", "no step", "a number"],
)
def test_lines_in_the_middle_that_cannot_be_read_are_removed_with_one_line(
    tmp_path, damage, caplog
):
    first, last = (json.dumps({"stage": "rl", "step": step}).encode() + b"\n" for step in (1, 2))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(first + damage + damage + last)
    assert run_state.truncate_metrics(tmp_path, 2) == 2
    assert path.read_bytes() == first + last
    assert len(caplog.records) == 1
    assert "2 lines" in caplog.text


def test_a_run_goes_on_in_a_file_of_its_own_if_its_metrics_are_a_link(tmp_path):
    target = tmp_path / "thesis.txt"
    target.write_text("dear\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").symlink_to(target)
    run_state.truncate_metrics(run, 2)
    assert not (run / "metrics.jsonl").is_symlink()
    assert target.read_text() == "dear\n"


def test_a_damaged_checkpoint_elsewhere_loses_only_its_link(tmp_path):
    folder = run_state.save_checkpoint(FilePolicy(0.25), tmp_path / "run", state_at(2))
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    (elsewhere / WEIGHT).write_bytes(b"")
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    run_state.save_checkpoint(FilePolicy(0.5), tmp_path / "run", state_at(2))
    assert not folder.is_symlink()
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before


def test_a_run_without_metrics_has_none_to_forget(tmp_path):
    assert run_state.truncate_metrics(tmp_path, 0) == 0


def test_of_the_same_policy_only_the_rest_is_written_anew(tmp_path):
    folder = run_state.save_checkpoint(FilePolicy(0.25), tmp_path, state_at(2))
    with pytest.raises(ValueError):
        run_state.save_checkpoint(FilePolicy(0.5), tmp_path, state_at(2))
    later = state_at(2, last_validated_step=2)
    assert run_state.start_checkpoint(FilePolicy(0.5), tmp_path, later, same_policy=True) is None
    policy = FilePolicy(0.0)
    assert run_state.load_checkpoint(policy, folder) == later
    assert policy.weight == 0.25


def test_the_start_is_the_last_to_go_on_from_and_is_not_removed(tmp_path):
    assert run_state.valid_checkpoints(tmp_path) == []
    save_warm_start(tmp_path)
    for step in (2, 4, 6):
        run_state.save_checkpoint(FilePolicy(step / 10), tmp_path, state_at(step))
    found = run_state.valid_checkpoints(tmp_path)
    names = ["checkpoints/step-000006", "checkpoints/step-000004", "warm_start/step-000000"]
    assert found == [tmp_path / name for name in names]


def test_damaged_checkpoints_are_named_and_the_next_is_taken(tmp_path, caplog):
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
    with pytest.raises(RuntimeError):
        run_state.load_newest_checkpoint(DeafPolicy(), run_state.valid_checkpoints(tmp_path))
    assert newest(tmp_path) is not None
    assert run_state.load_newest_checkpoint(DeafPolicy(), []) is None


def test_an_interrupted_warm_start_has_its_own_name_and_comes_last(tmp_path):
    progress = WarmStartProgress(step=7, loss=0.5, grad_norm=1.0, num_tokens=3)
    stopped = state_at(0, warm_start_progress=progress)
    run_state.save_checkpoint(FilePolicy(0.1), tmp_path, stopped)
    (folder,) = run_state.valid_checkpoints(tmp_path)
    assert folder.name == "warm-000007" and run_state.is_mid_warm_start(folder)
    assert run_state.load_checkpoint(FilePolicy(), folder) == stopped
    save_warm_start(tmp_path)
    found = [path.parent.name for path in run_state.valid_checkpoints(tmp_path)]
    assert found == ["warm_start", "checkpoints"]
