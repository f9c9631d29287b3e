"""Escaping: HTML that cannot run, JSON that cannot end its script tag."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.report.page.html import (
    SafeHtml,
    concat_html,
    escape_text,
    html_element,
    json_for_script,
    json_script_element,
)

HOSTILE = "</script><script>alert('x')</script><img src=x onerror=\"y\">&amp;\ud800\0\x1b[2J\u2028"
texts = st.text(alphabet=st.characters() | st.sampled_from("<>&\"'\ud800\0/"))


class Reader(HTMLParser):
    """Elements and text of what it is fed."""

    def __init__(self, markup):
        super().__init__(convert_charrefs=True)
        self.elements, self.text = [], ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def test_text_is_escaped_and_control_characters_are_shown():
    assert escape_text("a<b>&\"'") == "a&lt;b&gt;&amp;&quot;&#x27;"
    assert escape_text("\0\x1b\x9b\ud800") == "\\x00\\x1b\\x9b\ufffd"
    assert escape_text("a\u202eb\u2066") == "a\\u202eb\\u2066"
    assert escape_text("two\nlines\tand a tab") == "two\nlines\tand a tab"


def test_markup_is_escaped_once():
    assert escape_text(escape_text("<")) == "&lt;"
    assert html_element("p", html_element("b", "<"), "&") == "<p><b>&lt;</b>&amp;</p>"
    assert concat_html(["<", SafeHtml("<br>")]) == "&lt;<br>"


def test_attributes():
    made = html_element(
        "td", "x", class_="a b", data_chart='"><script>', hidden=True, title=None, id=False
    )
    assert made == '<td class="a b" data-chart="&quot;&gt;&lt;script&gt;" hidden>x</td>'
    assert html_element("br") == "<br>"


@given(texts)
def test_a_parser_reads_one_element_and_its_text(words):
    read = Reader(html_element("p", words, title=words))
    assert [name for name, _ in read.elements] == ["p"]
    assert read.text == read.elements[0][1]["title"]
    (read.text + "x").encode("utf-8")


def test_numbers_that_json_has_no_form_for():
    value = {"a": [math.nan, math.inf, -math.inf, 1.5], "b": (math.nan,)}
    assert json.loads(json_for_script(value)) == {
        "a": ["NaN", "Infinity", "-Infinity", 1.5],
        "b": ["NaN"],
    }


@given(texts)
def test_json_comes_back_and_holds_nothing_that_html_reads(words):
    made = json_for_script({words: [words]})
    assert made.isascii() and not set(made) & set("<>&")
    assert json.loads(made) == {words: [words]}


def test_a_data_block_ends_where_it_should():
    read = Reader(json_script_element("tree-0", [HOSTILE]))
    assert read.elements == [("script", {"type": "application/json", "id": "tree-0"})]
    assert json.loads(read.text) == [HOSTILE]
