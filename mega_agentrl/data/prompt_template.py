r"""Renders prompts through a Jinja template (`data.prompt_template`).

The rendered text replaces a prompt's last user message. The template sees

    {{ content }}         the text of that message
    {{ row.data_source }} the whole row by column, with nulls as None

    Answer in \boxed{}. Question: {{ content }}
    {%- if row.extra_info.unit %} Unit: {{ row.extra_info.unit }}{% endif %}

Templates are shared like data, so they run sandboxed: they cannot modify what they see or reach
Python internals. An undefined name is an error (test with `is defined`). Files in the template's
folder can be included.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import FileSystemLoader, StrictUndefined, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import reading
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from mega_agentrl.types.records import Message

_RENDER_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors that a template's expressions can raise, such as `{{ 1 / 0 }}`."""


class PromptTemplate:
    """A template file; raises `ValueError` with file and line if it is invalid."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        environment = ImmutableSandboxedEnvironment(
            loader=FileSystemLoader(self._path.parent), undefined=StrictUndefined
        )
        key, expected = "data.prompt_template", "a Jinja template in UTF-8"
        with reading(key, path, expected):
            try:
                self._template = environment.get_template(self._path.name)
            except TemplateSyntaxError as error:
                cause = f"line {error.lineno}: {error.message}"
                raise ConfigError(key, path, expected, cause) from error

    def apply(
        self, messages: tuple[Message, ...], row: Mapping[str, Any], where: str
    ) -> tuple[Message, ...]:
        """Render the last user message; `where` names the row in errors."""
        roles = [message["role"] for message in messages]
        if "user" not in roles:
            expected = f"a user message that data.prompt_template={self._path} can render"
            raise InputError(where, f"roles {roles}", expected)
        last = max(index for index, role in enumerate(roles) if role == "user")
        if not isinstance(messages[last]["content"], str):
            raise InputError(
                where,
                "a user message of parts",
                f"a text that data.prompt_template={self._path} can render; mark its images by "
                "<image>",
            )
        try:
            text = self._template.render(content=messages[last]["content"], row=row)
        except _RENDER_ERRORS as error:
            raise InputError(
                f"data.prompt_template={self._path} line {self._error_line(error)}, {where}",
                sorted(row),
                "a row with the columns that the template uses",
                f"{type(error).__name__}: {error}",
            ) from error
        return (*messages[:last], {**messages[last], "content": text}, *messages[last + 1 :])

    def _error_line(self, error: BaseException) -> int:
        """Return the template's line, which Jinja writes into the traceback."""
        line, trace = 0, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._template.filename:
                line = trace.tb_lineno
            trace = trace.tb_next
        return line
