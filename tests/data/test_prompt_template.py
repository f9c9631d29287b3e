"""Templates of prompts: what they render, and errors that name file, line and row."""

import pytest

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.data.prompt_template import PromptTemplate
from mega_agentrl.errors import InputError
from tests.config.refusals import refused_input

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
    ("text", "line", "cause"),
    [
        ("a\n{{ row.absent }}", 2, "UndefinedError"),
        ("\n\n{{ 1 / 0 }}", 3, "ZeroDivisionError"),
        ("{{ row.__class__.__mro__ }}", 1, "SecurityError"),
        ("{{ row.list.append(1) }}", 1, "SecurityError"),
        ("{% include 'absent' %}", 1, "TemplateNotFound"),
    ],
)
def test_an_error_of_a_template_names_line_and_row(tmp_path, text, line, cause):
    error = refused_input(template(tmp_path, text).apply, ASKED, {"list": []}, "f row 3")
    assert error.name.endswith(f"t.jinja line {line}, f row 3")
    assert error.got == ["list"] and error.cause.startswith(f"{cause}: ")


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
