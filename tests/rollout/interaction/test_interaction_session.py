"""User sessions: timeouts, failures, and a user in a trajectory."""

from __future__ import annotations

import asyncio

import pytest

from mega_agentrl.config.enums import CallProtocol
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.rollout import BranchConfig, RolloutConfig
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.branching.policy import BranchPolicy
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.rollout.interaction.base import Interaction, Reply
from mega_agentrl.rollout.interaction.session import InteractionRegistry, load_interaction_registry
from mega_agentrl.types.errors import ToolSessionError
from mega_agentrl.types.records import FinishReason, Generation, Role, StopReason
from tests.chat_models import save_tokenizer
from tests.fakes import FakeRubric, make_context, make_prompt
from tests.rollout.chat_run import call, converse, make_kit, prompt_for

BRANCH = BranchConfig(initial_rollouts=1, num_probe_tokens=6)


class User(Interaction):
    """Says `why?` until it has said so `patience` times; fails or hangs at one step."""

    name = "user"
    timeout_s = 0.1
    max_turns = 3

    def __init__(self, patience=9, *, step="", how="fail"):
        self.patience, self.step, self.how = patience, step, how
        self.heard, self.num_open = [], 0

    async def _may_fail(self, step):
        if step == self.step:
            if self.how == "hang":
                await asyncio.sleep(60)
            raise RuntimeError("no line")

    async def create(self, kwargs):
        await self._may_fail("create")
        self.num_open += 1
        return {"said": 0, **kwargs}

    async def respond(self, state, messages):
        await self._may_fail("respond")
        self.heard.append(messages)
        state["said"] += 1
        return Reply(text="why?", is_last=state["said"] > self.patience, reward=0.5)

    async def fork(self, state):
        await self._may_fail("fork")
        self.num_open += 1
        return dict(state)

    async def calc_reward(self, state):
        await self._may_fail("calc_reward")
        return float(state["said"])

    async def release(self, state):
        self.num_open -= 1
        await self._may_fail("release")


def _prompt(**kwargs):
    return make_prompt(extra_info={"interaction_kwargs": kwargs})


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return HFCodec(save_tokenizer("qwen25", tmp_path_factory.mktemp("qwen25")))


def test_the_prompt_chooses_its_interaction():
    one, other = User(), User()
    other.name = "other"
    assert InteractionRegistry([one]).open_session(make_prompt()) is None
    assert InteractionRegistry([]).open_session(_prompt()) is None
    assert InteractionRegistry([one]).open_session(_prompt()).name == "user"
    both = InteractionRegistry([one, other])
    assert both.open_session(_prompt(name="other")).name == "other"
    assert both.names == ("user", "other")
    for prompt in (_prompt(), _prompt(name="none")):
        with pytest.raises(InputError) as caught:
            both.check_prompt_kwargs([prompt])
        name = prompt.extra_info["interaction_kwargs"].get("name")
        expected = ("prompt p0: interaction_kwargs.name", name)
        assert (caught.value.name, caught.value.got) == expected


def test_kwargs_are_checked_before_the_run(tmp_path):
    path = tmp_path / "users.yaml"
    path.write_text("- class_name: mega_agentrl.rollout.interaction.gsm8k.Gsm8kInteraction\n")
    kit = load_interaction_registry(str(path), ["python"])
    kit.check_prompt_kwargs([_prompt(ground_truth="#### 3"), make_prompt()])
    with pytest.raises(InputError) as caught:
        kit.check_prompt_kwargs([_prompt()])
    assert (caught.value.name, caught.value.got) == ("prompt p0: interaction_kwargs", {})
    assert "ground_truth" in caught.value.cause
    with pytest.raises(ConfigError) as caught:
        load_interaction_registry(str(path), ["gsm8k_user"])
    assert caught.value.key == "rollout.interaction_config_file"
    assert "gsm8k_user" in caught.value.cause
    assert load_interaction_registry("", ["python"]).names == ()


@pytest.mark.parametrize("how", ["fail", "hang"])
@pytest.mark.parametrize("step", ["create", "respond", "fork", "calc_reward", "release"])
async def test_an_error_or_timeout_at_any_step_is_a_tool_session_error(step, how):
    session = InteractionRegistry([User(step=step, how=how)]).open_session(_prompt())

    async def live():
        await session.create()
        await session.respond([])
        await (await session.fork()).release()
        await session.calc_reward()
        await session.release()

    with pytest.raises(ToolSessionError) as caught:
        await asyncio.wait_for(live(), 300)
    outcome = caught.value.outcome
    assert outcome.tool == "user" and outcome.answer.startswith(f"{step}: ")
    assert ("no line" in outcome.answer) is (how == "fail")


@pytest.mark.parametrize("reply", ["text", Reply(text=3), Reply(reward=float("nan"))])
async def test_a_malformed_reply_is_an_error(reply):
    class Broken(User):
        async def respond(self, state, messages):
            return reply

    session = InteractionRegistry([Broken()]).open_session(_prompt())
    await session.create()
    with pytest.raises(ToolSessionError) as caught:
        await session.respond([])
    assert caught.value.outcome.answer.startswith("respond: ")
    await session.release()
    await session.release()


async def _talk(codec, user, turns, **options):
    kit = make_kit(codec)
    options |= {"prompt": prompt_for(codec, kit, extra_info={"interaction_kwargs": {}})}
    users = InteractionRegistry([user])
    return await converse(codec, turns, kit=kit, interactions=users, **options)


async def test_a_user_answers_until_it_has_enough(codec):
    user = User(patience=2)
    got, script = await _talk(codec, user, ["one", call(a=1, b=2), "two", "three"])
    authors = [turn.role.value for turn in got.turns]
    assert authors == [
        *("assistant", "user", "assistant", "tool", "assistant", "user", "assistant", "user")
    ]
    assert got.stop_reason is StopReason.interaction_end and not got.failed
    assert got.tool_rewards == {"user": 3.0} and got.step_rewards["user"] == [0.5] * 3
    assert user.num_open == 0 and got.template_drift == ""
    roles = [message["role"] for message in user.heard[-1]]
    assert roles[:6] == ["user", "assistant", "user", "assistant", "tool", "assistant"]
    assert roles[6:] == ["user", "assistant"]
    assert codec.decode_with_special_tokens(script.requests[1].token_ids).endswith(
        "one<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not any(got.loss_mask[got.turns[1].start : got.turns[1].stop])


@pytest.mark.parametrize(
    ("turns", "options", "reason", "num_heard"),
    [
        (["a"] * 4, {}, StopReason.interaction_limit, 4),
        (["a"] * 4, {"max_turns": 2}, StopReason.turn_limit, 2),
        (["a" * 80] * 4, {"max_response_tokens": 100}, StopReason.length, 1),
        (["a" * 500] * 4, {"max_response_tokens": 100}, StopReason.length, 0),
    ],
)
async def test_each_end_of_a_conversation_has_its_stop_reason(
    codec, turns, options, reason, num_heard
):
    user = User()
    got, _ = await _talk(codec, user, turns, **options)
    assert got.stop_reason is reason and len(user.heard) == num_heard and user.num_open == 0
    assert got.tool_rewards == {"user": float(num_heard)}


@pytest.mark.parametrize("how", ["fail", "hang"])
@pytest.mark.parametrize("step", ["create", "respond", "calc_reward"])
async def test_a_user_error_fails_the_trajectory_and_is_recorded(codec, step, how):
    user = User(patience=0, step=step, how=how)
    got, _ = await _talk(codec, user, ["one"])
    assert got.stop_reason is StopReason.tool_failure and got.score is None
    assert got.turns[-1].outcome.answer.startswith(f"{step}: ") and user.num_open == 0


async def test_an_error_in_release_does_not_fail_the_trajectory(codec):
    got, _ = await _talk(codec, User(patience=0, step="release"), ["one"])
    assert got.stop_reason is StopReason.interaction_end


async def test_cancellation_and_timeout_release_the_user(codec):
    class Patient(User):
        timeout_s = 60.0

    user = Patient(step="respond", how="hang")
    got, _ = await asyncio.wait_for(_talk(codec, user, ["one"], trajectory_timeout_s=0.1), 300)
    assert got.stop_reason is StopReason.trajectory_timeout and got.failed and user.num_open == 0
    task = asyncio.create_task(_talk(codec, user, ["one"]))
    while not user.num_open:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 300)
    assert user.num_open == 0


class Excited:
    """Calls once, then says it is three until asked why; excited behind the tool's answer."""

    version = 1

    def __init__(self, codec):
        self._codec = codec

    async def generate(self, request):
        before = self._codec.decode_with_special_tokens(request.token_ids)
        begun = before.rpartition("<|im_start|>assistant\n")[2]
        said = "It is three." if "</tool_response>" in before else call(a=1, b=2)
        rest = [*self._codec.encode(said.removeprefix(begun)), self._codec.eos_id]
        ids = tuple(rest[: request.max_tokens])
        entropy = 2.0 if "</tool_response>" in before else 1.0
        return Generation(
            request_id=request.request_id,
            token_ids=ids,
            logps=(-1.0,) * len(ids),
            entropies=(entropy,) * len(ids),
            argmax_ids=ids,
            finish_reason=FinishReason.eos if len(ids) == len(rest) else FinishReason.length,
            stop_string=None,
            version=1,
        )


async def _tree(codec, user, policy=None):
    """Two trajectories, one of them a fork where the user lets it. policy: default: ARPO's."""
    kit = make_kit(codec)
    (tree,) = await collect_rollouts(
        [prompt_for(codec, kit, extra_info={"interaction_kwargs": {}})],
        FakeRubric(),
        make_context(
            RolloutConfig(group_size=2, call_protocol=CallProtocol.hermes, branch=BRANCH),
            generator=Excited(codec),
            tools=kit,
            codec=codec,
            max_model_len=5000,
            interactions=InteractionRegistry([user]),
            policy=policy,
        ),
    )
    return tree


async def test_a_fork_has_a_user_of_its_own(codec):
    user = User(patience=1)
    tree = await _tree(codec, user)
    assert tree.num_forks == 1 and user.num_open == 0
    for one in tree.trajectories:
        assert one.stop_reason is StopReason.interaction_end
        assert one.tool_rewards == {"user": 2.0}


class ForkAfterUser(BranchPolicy):
    """A whole rule: fork at every turn after a message of the user."""

    def asks_at(self, turn):
        return turn.previous_role is Role.user

    def num_forks(self, point):
        return 1


async def test_a_rule_may_fork_after_the_users_message(codec):
    user = User(patience=1)
    tree = await _tree(codec, user, ForkAfterUser(BRANCH))
    root, fork = tree.trajectories
    assert fork.parent_id == root.trajectory_id and user.num_open == 0
    (decision,) = root.decisions
    assert decision.position == fork.fork_len == root.turns[4].start
    assert [turn.role for turn in root.turns[2:5]] == [Role.assistant, Role.user, Role.assistant]
    assert len(decision.probe_entropies) <= 6 and decision.probability is None
    for one in tree.trajectories:
        assert one.stop_reason is StopReason.interaction_end
        assert one.tool_rewards == {"user": 2.0}


async def test_a_user_that_cannot_be_forked_is_not(codec):
    class Alone(User):
        fork = Interaction.fork

    tree = await _tree(codec, Alone(patience=1))
    assert tree.num_forks == 0 and tree.num_extra_roots == 1
    assert not any(one.failed for one in tree.trajectories)


async def test_an_error_in_forking_the_user_fails_only_the_fork(codec):
    user = User(patience=1, step="fork")
    tree = await _tree(codec, user)
    root, fork = tree.trajectories
    assert not root.failed and fork.stop_reason is StopReason.tool_failure
    assert fork.turns[-1].outcome.answer.startswith("fork: ") and user.num_open == 0
