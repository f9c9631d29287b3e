"""Escaping: HTML that cannot run, JSON that cannot end its script tag."""

from __future__ import annotations

import html
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from markupsafe import Markup

from mega_agentrl.report.page.html import (
    json_for_script,
    json_script_element,
    template_environment,
)
from tests.report.pages import PageReader

HOSTILE = "</script><script>alert('x')</script><img src=x onerror=\"y\">&amp;\ud800\0\x1b[2J\u2028"
texts = st.text(alphabet=st.characters() | st.sampled_from("<>&\"'\ud800\0/"))


def render(source, **values):
    return template_environment().from_string(source).render(values)


def test_text_is_escaped_and_control_characters_are_shown():
    words = "a<b>&\"'"
    escaped = render("{{ words }}", words=words)
    assert not set(escaped) & set("<>\"'") and html.unescape(escaped) == words
    assert render("{{ words }}", words="\0\x1b\x9b\ud800") == "\\x00\\x1b\\x9b\ufffd"
    assert render("{{ words }}", words="a\u202eb\u2066") == "a\\u202eb\\u2066"
    assert render("{{ words }}", words="two\nlines\tand a tab") == "two\nlines\tand a tab"


def test_markup_is_not_escaped_again():
    assert render("{{ one }}{{ two }}", one="<", two=Markup("<br>")) == "&lt;<br>"


def test_a_value_that_is_missing_is_an_error():
    with pytest.raises(UndefinedError):
        render("{{ row.nmae }}", row=Markup(""))


@given(texts)
def test_a_parser_reads_one_element_and_its_text(words):
    read = PageReader(render('<p title="{{ words }}">{{ words }}</p>', words=words))
    assert [name for name, _ in read.elements] == ["p"]
    assert read.text == read.elements[0][1]["title"]
    (read.text + "x").encode("utf-8")


def test_numbers_that_json_has_no_form_for_become_text():
    value = {"a": [math.nan, math.inf, -math.inf, 1.5], "b": (math.nan,)}
    assert json.loads(json_for_script(value)) == {
        "a": ["NaN", "Infinity", "-Infinity", 1.5],
        "b": ["NaN"],
    }


@given(texts)
def test_json_for_scripts_is_read_back_and_has_no_markup(words):
    made = json_for_script({words: [words]})
    assert made.isascii() and not set(made) & set("<>&")
    assert json.loads(made) == {words: [words]}


def test_hostile_text_does_not_end_a_data_block():
    read = PageReader(json_script_element("tree-0", json_for_script([HOSTILE])))
    assert read.elements == [("script", {"type": "application/json", "id": "tree-0"})]
    assert json.loads(read.text) == [HOSTILE]
