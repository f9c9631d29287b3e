"""Messages in the forms of published data sets become one form."""

import numpy as np
import pytest

from mega_agentrl.data.chat_messages import validate_messages
from mega_agentrl.errors import InputError


def test_messages_lose_null_members():
    value = [{"role": "user", "content": "x", "name": None}]
    assert validate_messages(value, "here") == ({"role": "user", "content": "x"},)


def test_text_parts_are_joined_for_a_model_of_text():
    parts = [{"type": "text", "text": "s"}, {"type": "text", "text": " t"}]
    value = [{"role": "system", "content": parts}, {"role": "user", "content": "x"}]
    messages = validate_messages(value, "here")
    assert [message["content"] for message in messages] == ["s t", "x"]


def test_an_image_for_a_model_of_text_is_refused():
    part = {"type": "image_url", "image_url": {"url": "a.png"}}
    with pytest.raises(InputError) as caught:
        validate_messages([{"role": "user", "content": [part]}], "here")
    assert (caught.value.name, caught.value.got) == ("here, part of a message", part)
    assert validate_messages([{"role": "user", "content": [part]}], "here", with_parts=True)


def call(arguments, **members):
    return {"function": {"name": "find", "arguments": arguments}, **members}


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param([call({"ids": [1, [2]], "unit": None}, id="c1")], id="object"),
        pytest.param([call('{"ids": [1, [2]]}', id="c1")], id="json_text"),
        pytest.param([call({"ids": np.array([1, [2]], dtype=object)}, id="c1")], id="array"),
        pytest.param({"name": "find", "arguments": {"ids": [1, [2]]}, "id": "c1"}, id="bare_call"),
    ],
)
def test_a_null_content_beside_calls_is_an_empty_text_and_arguments_are_objects(calls):
    value = [{"role": "assistant", "content": None, "tool_calls": calls}]
    (message,) = validate_messages(value, "here")
    expected = [call({"ids": [1, [2]]}, id="c1")]
    assert message == {"role": "assistant", "content": "", "tool_calls": expected}


@pytest.mark.parametrize("bad", ["find()", [call("[1]")], [call("{")], [{"function": {}}]])
def test_calls_of_another_form_are_refused(bad):
    with pytest.raises(InputError) as caught:
        validate_messages([{"role": "assistant", "content": "", "tool_calls": bad}], "here")
    assert caught.value.name == "here, tool_calls"


@pytest.mark.parametrize("message", ["hello", None, 3, ["user", "x"], {"role": "user"}])
def test_an_invalid_message_is_refused(message):
    with pytest.raises(InputError) as caught:
        validate_messages([message], "train.parquet row 4")
    assert caught.value.name == "train.parquet row 4"
