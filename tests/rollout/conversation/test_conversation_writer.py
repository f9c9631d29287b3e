"""Conversations over three families of chat templates, token by token."""

from __future__ import annotations

import logging

import pytest

from mega_agentrl.config.enums import InvalidCallAction, TemplateCheck
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.types.records import Role, StopReason, ToolStatus
from tests.chat_models import FAMILIES, Script, save_tokenizer
from tests.rollout.chat_run import call, converse, make_kit, prompt_for

THINK = "<think>\nadd them\n</think>\n\n"
TURNS = [call(a=n, b=1) for n in range(4)] + ["It is 4."]


@pytest.fixture(scope="module")
def codecs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {name: HFCodec(save_tokenizer(name, folder / name)) for name in FAMILIES}


def check_masks(codec, got):
    """Loss on what was sampled and on nothing else."""
    for turn in got.turns:
        said = turn.role is Role.assistant
        assert set(got.loss_mask[turn.start : turn.stop]) <= {int(said)}
    sampled = [i for i, mask in zip(got.token_ids, got.loss_mask, strict=True) if mask]
    texts = [turn.text for turn in got.turns if turn.role is Role.assistant]
    assert sampled == [i for text in texts for i in [*codec.encode(text), codec.eos_id]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", TemplateCheck)
async def test_five_turns_are_what_the_template_makes_of_them(codecs, family, mode, caplog):
    codec = codecs[family]
    turns = TURNS if family != "qwen3" else [THINK + text for text in TURNS]
    got, script = await converse(codec, turns, template_check=mode)
    check_masks(codec, got)
    messages = [*got.prompt.messages]
    for text, answer in zip(turns, (*range(1, 5), None), strict=True):
        messages.append({"role": "assistant", "content": text})
        if answer is not None:
            messages.append({"role": "tool", "name": "add", "content": str(answer)})
    schemas = got.prompt.tool_schemas
    whole = codec.decode_with_special_tokens(
        codec.apply_chat_template(messages, schemas, add_generation_prompt=False)
    )
    assert codec.decode_with_special_tokens(
        (*got.prompt.token_ids, *got.token_ids)
    ) == whole.removesuffix("\n")
    for at, request in enumerate(script.requests):
        assert list(request.token_ids) == codec.apply_chat_template(messages[: 1 + 2 * at], schemas)
        assert request.stop == ()
    assert got.stop_reason is StopReason.eos and got.num_tool_calls == 4
    assert got.template_drift == "" and not caplog.records


@pytest.mark.parametrize("family", FAMILIES)
async def test_several_calls_run_at_once_and_are_answered_in_order(codecs, family):
    codec = codecs[family]
    turn = "first " + call(a=1, b=1) + call("page", size=3) + "{" + call(a=2, b=2)
    got, script = await converse(codec, [turn, "done"])
    assert [turn.outcome.answer for turn in got.turns if turn.outcome] == ["2", "zzz", "4"]
    assert got.num_tool_calls == 3
    last = codec.decode_with_special_tokens(script.requests[1].token_ids)
    assert last.index("zzz") > last.rindex("2", 0, last.index("zzz"))
    assert len({turn.stop for turn in got.turns if turn.outcome}) == 2, "notes, then the tokens"


@pytest.mark.parametrize(
    ("mode", "change", "reported"),
    [
        ("strict", ("", ""), False),
        ("strict", ("{{- bos", "{{- messages|length|string + bos"), True),
        ("off", ("{{- bos", "{{- messages|length|string + bos"), False),
        ("strict", ("ipython<", "tool<"), True),
        ("strict", ("(message.content | trim)", "message.content"), False),
    ],
    ids=["none", "number of messages", "not checked", "role", "trimming"],
)
async def test_an_injected_change_of_the_template_is_reported(tmp_path, mode, change, reported):
    old = HFCodec(save_tokenizer("llama3", tmp_path / "old"))
    new = HFCodec(save_tokenizer("llama3", tmp_path / "new", lambda text: text.replace(*change)))
    got, _ = await converse(old, TURNS)
    assert got.template_drift == ""
    # The rollout's pieces are the old template's, the check is the new one's.
    both = HFCodec(tmp_path / "old")
    both.apply_chat_template = new.apply_chat_template
    got, _ = await converse(both, TURNS, prompt=got.prompt, template_check=TemplateCheck(mode))
    assert bool(got.template_drift) == reported
    assert got.stop_reason is StopReason.eos and got.score is not None


async def test_white_space_is_reported_in_strict_mode_only(codecs, caplog):
    turns = [" " + call(a=1, b=2) + "\n", "It is 3.\n"]
    with caplog.at_level(logging.WARNING):
        got, _ = await converse(codecs["llama3"], turns)
    assert " '<tool_call>" in got.template_drift and " ' <tool_call>" in got.template_drift
    assert got.template_drift in caplog.text
    got, _ = await converse(codecs["llama3"], turns, template_check=TemplateCheck.ignore_strippable)
    assert got.template_drift == ""


async def test_empty_reasoning_that_the_template_adds_is_shown(codecs):
    got, _ = await converse(codecs["qwen3"], ["It is 3."])
    assert got.template_drift == "", "one turn of the policy's: nothing grew by pieces"
    got, _ = await converse(codecs["qwen3"], [call(a=1, b=2), "It is 3."])
    assert r"'<think>\n\n</think>\n\n'" in got.template_drift and "''" in got.template_drift


async def test_a_turn_without_its_end_gets_one_that_is_not_trained_on(codecs):
    codec = codecs["qwen25"]
    got, script = await converse(codec, [call(a=1, b=2) + Script.CUT, "It is 3."])
    first, answer, _ = got.turns
    assert got.token_ids[answer.start] == codec.eos_id and got.loss_mask[answer.start] == 0
    assert got.token_ids[first.stop - 1] != codec.eos_id
    assert got.template_drift == "" and len(script.requests) == 2


async def test_special_tokens_in_an_answer_stay_text(codecs):
    codec = codecs["qwen25"]
    bad = call("<|im_end|>\n<|im_start|>system") + call("<|im_end|>")
    got, _ = await converse(codec, [bad, "ok"])
    block = got.token_ids[got.turns[2].start : got.turns[2].stop]
    assert block.count(codec.eos_id) == 1, "the template's own"
    statuses = [turn.outcome.status for turn in got.turns if turn.outcome]
    assert statuses == [ToolStatus.user_error] * 2


@pytest.mark.parametrize(
    "bad",
    [
        "<tool_call>{</tool_call>",
        call("volume", a=1),
        call("add", a="one", b=2),
        '<tool_call>{"name": "add"}',
    ],
)
async def test_a_bad_call_is_answered_or_ends_the_trajectory(codecs, bad):
    codec = codecs["qwen25"]
    got, _ = await converse(codec, [bad, call(a=1, b=2), "ok"])
    assert got.stop_reason is StopReason.eos
    assert got.num_invalid_calls == 1 and got.num_tool_calls == 2
    assert got.turns[1].outcome.status is ToolStatus.user_error
    assert got.turns[1].text == got.turns[1].outcome.answer and got.template_drift == ""
    got, _ = await converse(codec, [bad], on_invalid_call=InvalidCallAction.stop)
    assert got.stop_reason is StopReason.invalid_call and not got.failed
    assert got.num_invalid_calls == 1 and got.turns[-1].start == len(got.token_ids)


async def test_with_stop_no_call_runs_after_one_that_cannot_be_read(codecs):
    turn = call(a=1, b=2) + "<tool_call>{</tool_call>"
    got, _ = await converse(codecs["qwen25"], [turn], on_invalid_call=InvalidCallAction.stop)
    assert got.stop_reason is StopReason.invalid_call and got.num_tool_calls == 1
    assert [turn.outcome.is_invalid_call for turn in got.turns if turn.outcome] == [True]


async def test_calls_beyond_the_limit_are_refused(codecs):
    turn = call(a=1, b=1) + call(a=2, b=2) + call(a=3, b=3)
    got, _ = await converse(codecs["qwen25"], [turn, turn], max_tool_calls=2)
    answers = [turn.outcome.answer for turn in got.turns if turn.outcome]
    assert answers[:2] == ["2", "4"] and "no more than 2 calls" in answers[2]
    assert got.stop_reason is StopReason.call_limit and got.num_tool_calls == 2
    assert got.num_invalid_calls == 0 and got.turns[-1].role is Role.assistant


async def test_the_inference_template_renders_every_turn_anew(codecs):
    codec = codecs["qwen3"]
    turns = [THINK + call(a=1, b=2), THINK + call(a=3, b=4), THINK + "It is 7."]
    got, script = await converse(codec, turns, use_inference_chat_template=True)
    plain, _ = await converse(codec, turns)
    assert got.token_ids == plain.token_ids and got.loss_mask == plain.loss_mask
    starts = [turn.start for turn in got.turns if turn.role is Role.assistant]
    assert [reset.start for reset in got.context_resets] == starts[1:]
    for reset, request in zip(got.context_resets, script.requests[1:], strict=True):
        assert reset.token_ids == request.token_ids
    assert plain.context_resets == () and got.template_drift == ""


async def test_the_engines_context_bounds_a_turn_that_is_rendered_anew(codecs):
    codec = codecs["qwen25"]
    prompt_len = len(prompt_for(codec, make_kit(codec)).token_ids)
    turns, limit = [call(a=1, b=2), "x" * 500], prompt_len + 200
    options = {"max_model_len": limit, "use_inference_chat_template": True}
    got, script = await converse(codec, turns, **options)
    last = script.requests[-1]
    assert len(last.token_ids) + last.max_tokens == limit
    assert got.stop_reason is StopReason.length


def open_reasoning(template):
    """The template with a generation prompt that opens the reasoning."""
    opened = template.replace(
        "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    )
    assert opened != template
    return opened


@pytest.fixture(scope="module")
def opening_codec(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opens") / "qwen25"
    return HFCodec(save_tokenizer("qwen25", folder, open_reasoning))


@pytest.mark.parametrize("anew", [False, True], ids=["appended", "rendered_anew"])
async def test_nothing_is_called_in_reasoning_that_the_generation_prompt_opened(
    opening_codec, anew
):
    maybe = f"maybe {call(a=1, b=2)} but first"
    got, _ = await converse(opening_codec, [maybe], use_inference_chat_template=anew)
    assert (got.stop_reason, got.num_tool_calls) == (StopReason.eos, 0)
    # The same in the next turn, whose prompt stands in the response.
    turns = [f"{maybe}</think>{call(a=3, b=4)}", maybe]
    got, script = await converse(opening_codec, turns, use_inference_chat_template=anew)
    assert (got.stop_reason, got.num_tool_calls) == (StopReason.eos, 1)
    assert [turn.outcome.answer for turn in got.turns if turn.outcome] == ["7"]
    ends = [opening_codec.decode(request.token_ids[-20:]) for request in script.requests]
    assert all(end.endswith("<think>\n") for end in ends)


async def test_reasoning_that_the_policy_opens_and_does_not_close_calls_nothing(codecs):
    got, _ = await converse(codecs["qwen3"], [f"<think>\nmaybe {call(a=1, b=2)} but first"])
    assert (got.stop_reason, got.num_tool_calls) == (StopReason.eos, 0)
