"""Templates of prompts: what they render, and errors that name file, line and row."""

import pytest

from mega_agentrl.data.prompt_template import PromptTemplate

ASKED = ({"role": "system", "content": "S"}, {"role": "user", "content": "1+1?"})


def template(tmp_path, text):
    path = tmp_path / "t.jinja"
    path.write_text(text, encoding="utf-8")
    return PromptTemplate(str(path))


def test_the_last_user_message_is_rendered_and_nothing_else(tmp_path):
    made = template(tmp_path, "Q: {{ content }}\n{% if row.unit %}in {{ row.unit }}{% endif %}")
    given = (*ASKED, {"role": "assistant", "content": "2"}, {"role": "user", "content": "{{ 2 }}"})
    *before, last = made.apply(given, {"unit": "m"}, "row 0")
    assert before == list(given[:3])
    assert last == {"role": "user", "content": "Q: {{ 2 }}\nin m"}
    (_, only) = made.apply(ASKED, {"unit": None}, "row 0")
    assert only["content"] == "Q: 1+1?\n"
    assert ASKED[1]["content"] == "1+1?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\n{{ row.absent }}", r"t\.jinja line 2, f row 3: UndefinedError: .*absent"),
        ("\n\n{{ 1 / 0 }}", r"line 3, f row 3: ZeroDivisionError"),
        ("{{ row.__class__.__mro__ }}", r"line 1, f row 3: SecurityError"),
        ("{{ row.list.append(1) }}", r"line 1, f row 3: SecurityError"),
        ("{% include 'absent' %}", r"line 1, f row 3: TemplateNotFound"),
    ],
)
def test_an_error_of_a_template_names_line_and_row(tmp_path, text, expected):
    with pytest.raises(ValueError, match=expected):
        template(tmp_path, text).apply(ASKED, {"list": []}, "f row 3")


def test_a_file_that_is_no_template_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.prompt_template=.*t\.jinja.* line 2"):
        template(tmp_path, "a\n{% if %}")
    (tmp_path / "t.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"data\.prompt_template=.*t\.jinja.*UnicodeDecodeError"):
        PromptTemplate(str(tmp_path / "t.jinja"))
    with pytest.raises(ValueError, match=r"data\.prompt_template=.*absent\.jinja"):
        PromptTemplate(str(tmp_path / "absent.jinja"))


def test_a_prompt_without_a_user_message_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"f row 1: got roles"):
        template(tmp_path, "x").apply(ASKED[:1], {}, "f row 1")
