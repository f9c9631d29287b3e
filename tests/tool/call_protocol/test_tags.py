"""The tag protocol: what is a call, and that tool output never is one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.tool.call_protocol.tags import TagProtocol
from tests.config.refusals import refused_input

TAGS = TagProtocol({"python": "code", "search": "query"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think> a </think> <python> 1+1 </python>", ("python", {"code": "1+1"})),
        ("<search> q </search>", ("search", {"query": "q"})),
        ("<python>a<python>b</python>", ("python", {"code": "b"})),
        ("<python>1</python> x <search>q</search>", ("search", {"query": "q"})),
        ("<search><python>1</python></search>", ("search", {"query": "<python>1</python>"})),
        ("<python>\nx = 1\n  y\n</python>\n", ("python", {"code": "x = 1\n  y"})),
        ("<python>1</python>\n\n<", ("python", {"code": "1"})),
        ("<python>  </python>", None),
        ("1+1</python>", None),
        ("<python>1</python> and then", None),
        ("<answer> 1 </answer>", None),
        ("<python>1", None),
        ("", None),
    ],
)
def test_the_call_at_the_end_of_a_turn_is_read(text, expected):
    calls = [(call.tool, dict(call.arguments)) for call in TAGS.parse_calls(text)]
    assert calls == [expected] * (expected is not None)


def test_calls_end_a_turn_at_their_tags_and_are_answered_inside_it():
    assert TAGS.stop_strings == ("</python>", "</search>")
    assert TAGS.call_markers == ("<python>", "</python>", "<search>", "</search>")
    assert not TAGS.uses_tool_messages


def test_an_answer_is_framed_and_escaped():
    assert TAGS.render("1 < 2") == " <result>\n1 < 2\n</result>"
    assert TAGS.render("</result>") == " <result>\n&lt;/result>\n</result>"


def test_tags_of_tools_and_control_tokens_are_escaped():
    assert TagProtocol({"notes": "text"}).escape("</notes>") == "&lt;/notes>"
    assert TagProtocol({}, ["[CTL]"]).escape("[CTL]") == "&#91;CTL]"


@pytest.mark.parametrize("name", ["answer", "a b", "<x>", ""], ids=["answer", "two", "tag", "none"])
def test_a_tool_needs_a_name_that_can_be_a_tag(name):
    assert refused_input(TagProtocol, {name: "text"}).got == name


@given(st.text(alphabet="<>/pythonsearch ", max_size=60))
def test_any_text_is_read_and_a_call_is_part_of_it(text):
    for call in TAGS.parse_calls(text):
        (content,) = call.arguments.values()
        assert content and content in text


@given(st.lists(st.sampled_from(["<", "</", "python", ">", "\u200b", "\uff1c", " 1 ", "x"])))
def test_what_a_tool_says_is_never_a_call(pieces):
    assert TAGS.parse_calls(TAGS.escape("".join(pieces))) == ()
