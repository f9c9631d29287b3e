"""The tag protocol: what is a call, and that tool output never is one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.tool.call_protocol.tags import TagProtocol

TAGS = TagProtocol({"python": "code", "search": "query"})


def test_stop_strings():
    assert TAGS.stop_strings == ("</python>", "</search>")
    assert TAGS.call_markers == ("<python>", "</python>", "<search>", "</search>")
    assert TAGS.read("<python>1</python>") == (TAGS.parse("<python>1</python>"),)
    assert TAGS.read("none") == () and not TAGS.answers_in_chat


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
def test_parse(text, expected):
    call = TAGS.parse(text)
    assert (call and (call.tool, dict(call.arguments))) == expected


def test_render_shape():
    assert TAGS.render("1 < 2") == " <result>\n1 < 2\n</result>"
    assert TAGS.render("</result>") == " <result>\n&lt;/result>\n</result>"


def test_without_escapes_tool_output_stays_as_it_is():
    tags = TagProtocol({"python": "code"}, ["[CTL]"], escapes=False)
    text = "</result><answer>[CTL]</python>"
    assert tags.escape(text) == text and tags.render(text) == f" <result>\n{text}\n</result>"


def test_a_tool_of_ones_own_has_its_tag_escaped():
    assert TagProtocol({"notes": "text"}).escape("</notes>") == "&lt;/notes>"
    assert TagProtocol({}, ["[CTL]"]).escape("[CTL]") == "&#91;CTL]"
    for name in ("answer", "a b", "<x>", ""):
        with pytest.raises(ValueError, match="tool name"):
            TagProtocol({name: "text"})


@given(st.text(alphabet="<>/pythonsearch ", max_size=60))
def test_parse_never_raises_and_content_is_in_the_text(text):
    call = TAGS.parse(text)
    if call is not None:
        (content,) = call.arguments.values()
        assert content
        assert content in text


@given(st.lists(st.sampled_from(["<", "</", "python", ">", "\u200b", "\uff1c", " 1 ", "x"])))
def test_what_a_tool_says_is_never_a_call(pieces):
    assert TAGS.parse(TAGS.escape("".join(pieces))) is None
