"""Failures stay with their trajectory: marked, masked, left out of the means."""

from __future__ import annotations

import asyncio

import pytest

from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.config.enums import Branching
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.rollout.metrics.rollout import rollout_metrics
from mega_agentrl.tool.base import Tool, ToolResponse
from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.types.records import StopReason, ToolStatus
from tests.fakes import EOS, FakeGenerator, FakeRubric, make_context, make_prompt
from tests.rollout.virtual_time import run_virtually

NAMES = ("fine", "hangs", "raises", "large", "dead")


class Moody(Tool):
    """Does what the call's text names."""

    name = "python"
    text_argument = "text"
    timeout_s = 0.2

    async def execute(self, state, arguments, kwargs):
        match arguments["text"]:
            case "hangs":
                await asyncio.sleep(60)
            case "raises":
                raise OSError("no disk")
            case "large":
                return ToolResponse(text="\u00e9" * 10_000_000)
        return ToolResponse(text="done")


def _write(response, request):
    """The prompt's name as a call, then an answer."""
    name = request.request_id.partition("/")[0]
    said = f"<python>{name}</python>" if "</result>" not in response else f"<answer>1</answer>{EOS}"
    return said[len(response.rpartition("</result>")[2]) :]


def _breaks(request):
    """The engine dies in the middle: under the second turn of one prompt."""
    return request.request_id.startswith("dead/") and "/2." in request.request_id


async def _collect_all():
    context = make_context(
        RolloutConfig(group_size=2, branching=Branching.none, max_response_tokens=400),
        generator=FakeGenerator(_write, breaks=_breaks),
        tools=ToolKit([Moody()]),
        max_model_len=1000,
    )
    got = await collect_rollouts([make_prompt(name) for name in NAMES], FakeRubric(), context)
    assert asyncio.get_running_loop().time() < 1, "nobody waited for the one that hangs"
    return dict(zip(NAMES, got, strict=True))


@pytest.fixture(scope="module")
def trees():
    return run_virtually(_collect_all())


def _of(trees, name):
    return trees[name].trajectories


def test_the_batch_completes_with_stop_reasons(trees):
    reasons = {name: {one.stop_reason for one in _of(trees, name)} for name in NAMES}
    assert reasons == {
        "fine": {StopReason.eos},
        "hangs": {StopReason.eos},
        "raises": {StopReason.tool_failure},
        "large": {StopReason.eos},
        "dead": {StopReason.aborted},
    }
    statuses = {name: _of(trees, name)[0].turns[1].outcome.status for name in NAMES}
    assert statuses["hangs"] is ToolStatus.timeout, "the policy's own slow code: it sees it"
    assert statuses["raises"] is ToolStatus.infra_error
    assert "Timed out after 0.2 s." in _of(trees, "hangs")[0].response_text


def test_a_large_answer_is_cut_to_what_fits(trees):
    for one in _of(trees, "large"):
        assert "... [cut]" in one.response_text and len(one.token_ids) < 400


def test_failed_trajectories_are_masked_and_form_their_own_groups(trees):
    batch = pack_trees(list(trees.values()))
    failed = [name in ("raises", "dead") for name in NAMES for _ in range(2)]
    assert [not bool(row.any()) for row in batch.mask_BT] == failed
    groups = batch.group_B.tolist()
    assert all(groups.count(group) == 1 for group, bad in zip(groups, failed, strict=True) if bad)


def test_means_leave_failures_out(trees):
    whole = rollout_metrics(list(trees.values()))
    good = rollout_metrics([trees[name] for name in ("fine", "hangs", "large")])
    for key in ("reward_mean", "success", "response_tokens_mean", "num_turns_mean"):
        assert whole[f"rollout/{key}"] == pytest.approx(good[f"rollout/{key}"])
    assert whole["rollout/failed_fraction"] == 0.4 and good["rollout/failed_fraction"] == 0
    assert whole["rollout/stop/tool_failure"] == whole["rollout/stop/aborted"] == 0.2
    assert all(one.score is None for name in ("raises", "dead") for one in _of(trees, name))


def test_an_engine_that_dies_keeps_the_tokens_so_far(trees):
    for one in _of(trees, "dead"):
        assert one.response_text.startswith("<python>dead</python> <result>\ndone")
