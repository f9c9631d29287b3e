"""Templates of prompts: what they render, and errors that name file, line and row."""

import pytest

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.data.prompt_template import PromptTemplate
from mega_agentrl.errors import InputError

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
    path = str(tmp_path / "t.jinja")
    with pytest.raises(ConfigError) as caught:
        template(tmp_path, "a\n{% if %}")
    assert (caught.value.key, str(caught.value.got)) == ("data.prompt_template", path)
    assert caught.value.cause.startswith("line 2")
    (tmp_path / "t.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError) as caught:
        PromptTemplate(path)
    assert (caught.value.key, str(caught.value.got)) == ("data.prompt_template", path)
    with pytest.raises(ConfigError) as caught:
        PromptTemplate(str(tmp_path / "absent.jinja"))
    assert caught.value.key == "data.prompt_template"


def test_a_prompt_without_a_user_message_is_refused(tmp_path):
    with pytest.raises(InputError) as caught:
        template(tmp_path, "x").apply(ASKED[:1], {}, "f row 1")
    assert caught.value.name == "f row 1"
