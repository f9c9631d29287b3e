"""The tag protocol: what is a call, and that tool output never is one."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.tool.tags import CONTROL_TAGS, TagProtocol

TAGS = TagProtocol({"python": "code", "search": "query"})


def test_stop_strings():
    assert TAGS.stop_strings == ("</python>", "</search>")


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


@pytest.mark.parametrize(
    "name", ["think", "answer", "search", "python", "result", "tool_call", "ANSWER", "s"]
)
def test_control_tags_are_escaped(name):
    for tag in (
        f"<{name}>",
        f"</{name}>",
        f"< / {name} >",
        f"<{name} x=1>",
        f"<{name}/>",
        f"<{name}",
    ):
        assert TAGS.escape(f"a {tag}") == f"a {tag}".replace("<", "&lt;")


@pytest.mark.parametrize(
    "marker", ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<\uff5cUser\uff5c>"]
)
def test_chat_markers_are_escaped(marker):
    assert TAGS.escape(marker) == "&lt;" + marker[1:]


def test_harmless_text_is_kept():
    text = "a < b, <class 'int'>, List<String>, <b>bold</b>, <thinking>, x<-y, 1<<2"
    assert TAGS.escape(text) == text


def test_a_tool_of_ones_own_has_its_tag_escaped():
    assert TagProtocol({"notes": "text"}).escape("</notes>") == "&lt;/notes>"
    for name in ("answer", "a b", "<x>", ""):
        with pytest.raises(ValueError, match="tool name"):
            TagProtocol({name: "text"})


PIECES = st.lists(
    st.sampled_from([*"<>/| ", "&lt;", "|>", "<|", "im_end", "think", "answer", "result", "search"])
)


@given(PIECES.map("".join))
def test_escaped_text_holds_no_tag_and_settles(text):
    once = TAGS.escape(text)
    assert not re.search(rf"</?({'|'.join(CONTROL_TAGS)})>|<\|", once)
    assert TAGS.escape(once) == once
    assert once.replace("&lt;", "<") == text.replace("&lt;", "<")


@given(st.text(alphabet="<>/pythonsearch ", max_size=60))
def test_parse_never_raises_and_content_is_in_the_text(text):
    call = TAGS.parse(text)
    if call is not None:
        (content,) = call.arguments.values()
        assert content
        assert content in text
