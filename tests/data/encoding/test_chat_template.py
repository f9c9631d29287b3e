"""A conversation that grows by pieces is what the template makes of the whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.data.encoding.codec import HFCodec
from tests.chat_models import FAMILIES, LLAMA, QWEN, save_tokenizer

USER = {"role": "user", "content": "How warm is it?"}
CALL = {"role": "assistant", "content": '<tool_call>{"name": "a"}</tool_call>'}


@pytest.fixture(scope="module")
def codecs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {name: HFCodec(save_tokenizer(name, folder / name)) for name in FAMILIES}


def tool(text):
    return {"role": "tool", "content": text}


def grown(codec, messages):
    """The conversation by pieces, every assistant message as it would be sampled."""
    starts = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    ids = codec.apply_chat_template(messages[: starts[0]])
    for at, following in zip(starts, [*starts[1:], len(messages)], strict=True):
        ids += [*codec.encode(messages[at]["content"]), codec.eos_id]
        ids += codec.encode_next_turn(messages[at + 1 : following])
    return ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "answers",
    [
        [tool("20 degrees")],
        [tool("20 degrees"), tool("and rain")],
        [{"role": "user", "content": "Are you sure?"}],
        [tool('{"a": "\\n"}'), {"role": "user", "content": " And tomorrow?"}],
    ],
)
def test_pieces_add_up_to_the_whole(codecs, family, answers):
    codec = codecs[family]
    messages = [{"role": "system", "content": "Be brief."}, USER, CALL, *answers]
    assert grown(codec, messages) == codec.apply_chat_template(messages)


@pytest.mark.parametrize("family", FAMILIES)
def test_several_turns_add_up_to_the_whole(codecs, family):
    messages = [USER, CALL, tool("1"), CALL, tool("2"), tool("3"), CALL, tool("4")]
    assert grown(codecs[family], messages) == codecs[family].apply_chat_template(messages)


def test_old_reasoning_stays_in_the_pieces_and_goes_in_the_whole(codecs):
    codec = codecs["qwen3"]
    said = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nWarm."}
    messages = [USER, said, {"role": "user", "content": "Sure?"}]
    assert "hm" in codec.decode_with_special_tokens(grown(codec, messages))
    assert "hm" not in codec.decode_with_special_tokens(codec.apply_chat_template(messages))


@pytest.mark.parametrize("family", FAMILIES)
@given(text=st.lists(st.sampled_from([*QWEN, *LLAMA, "a", "<|im", "_end|>", " ", "\n", '"'])))
def test_no_message_contains_a_special_token(codecs, family, text):
    codec, said = codecs[family], "".join(text)
    special = set(codec._tokenizer.all_special_ids)
    special |= {codec._tokenizer.convert_tokens_to_ids(token) for token in (*QWEN, *LLAMA)}

    def marks(message):
        return [one for one in codec.encode_next_turn([message]) if one in special]

    for role in ("user", "tool"):
        hostile, harmless = ({"role": role, "content": each} for each in (said, "x"))
        assert marks(hostile) == marks(harmless)
    shown = codec.decode_with_special_tokens(
        codec.encode_next_turn([{"role": "user", "content": said}])
    )
    assert said.strip() in shown, "what was said is still there, letter by letter"
    whole = codec.apply_chat_template([{"role": "user", "content": said}])
    plain = codec.apply_chat_template([{"role": "user", "content": "x"}])
    assert [i for i in whole if i in special] == [i for i in plain if i in special]


def test_half_a_surrogate_pair_becomes_a_question_mark(codecs):
    assert "a?b" in codecs["qwen25"].decode_with_special_tokens(
        codecs["qwen25"].encode_next_turn([tool("a\ud800b")])
    )


def test_what_the_template_writes_behind_the_last_turn(codecs):
    assert codecs["qwen3"].turn_end_text == "<|im_end|>\n"
    assert codecs["llama3"].turn_end_text == "<|eot_id|>"


def test_tools_are_rendered_and_the_generation_prompt_is_optional(codecs):
    codec = codecs["qwen25"]
    schema = {"type": "function", "function": {"name": "weather"}}
    text = codec.decode_with_special_tokens(codec.apply_chat_template([USER], [schema]))
    assert '"name": "weather"' in text and text.endswith("<|im_start|>assistant\n")
    assert codec.decode_with_special_tokens(
        codec.apply_chat_template([USER], add_generation_prompt=False)
    ).endswith("warm is it?<|im_end|>\n")


def test_a_template_that_drops_earlier_turns_cannot_append(tmp_path):
    def last_only(template):
        return "{{ messages[-1].content + eos_token }}"

    codec = HFCodec(save_tokenizer("qwen25", tmp_path, last_only))
    with pytest.raises(ValueError, match=r"cannot append a turn.* role user"):
        codec.encode_next_turn([USER])
