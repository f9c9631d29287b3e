"""A Jinja template around each prompt (`data.template`).

It stands for the text of a prompt's last user message and sees

    {{ content }}         that text
    {{ row.data_source }} the whole row, by column; a null is none

    Answer in \\boxed{}. Question: {{ content }}
    {%- if row.extra_info.unit %} Unit: {{ row.extra_info.unit }}{% endif %}

Sandboxed: it can neither change what it sees nor reach Python's insides, as templates are passed
around like data. A name that is not there is an error (`is defined` asks for it). Other files of
its folder can be included.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import FileSystemLoader, StrictUndefined, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from mega_agentrl.types.records import Message

_FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What an expression of a template can raise, `{{ 1 / 0 }}` among it."""


class PromptTemplate:
    """A template file; raises ValueError with file and line where it is none."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        environment = ImmutableSandboxedEnvironment(
            loader=FileSystemLoader(self._path.parent), undefined=StrictUndefined
        )
        try:
            self._template = environment.get_template(self._path.name)
        except TemplateSyntaxError as error:
            raise ValueError(
                f"data.template={path} line {error.lineno}: {error.message}; expected a Jinja "
                "template"
            ) from error
        except (TemplateError, UnicodeDecodeError) as error:
            raise ValueError(
                f"data.template={path}: {type(error).__name__}: {error}; expected a Jinja template "
                "in UTF-8; probable cause: no such file"
            ) from error

    def apply(
        self, messages: tuple[Message, ...], row: Mapping[str, Any], where: str
    ) -> tuple[Message, ...]:
        """The messages with the last user message rendered; `where` names the row in errors."""
        last = max((i for i, one in enumerate(messages) if one["role"] == "user"), default=None)
        if last is None:
            raise ValueError(
                f"{where}: got roles {[one['role'] for one in messages]}, expected a user message "
                f"that data.template={self._path} is put around"
            )
        try:
            text = self._template.render(content=messages[last]["content"], row=row)
        except _FAILURES as error:
            line = self._line_of(error)
            raise ValueError(
                f"data.template={self._path} line {line}, {where}: {type(error).__name__}: "
                f"{error}; got a row with {sorted(row)}, expected one that the template can be "
                "filled from"
            ) from error
        return (*messages[:last], {**messages[last], "content": text}, *messages[last + 1 :])

    def _line_of(self, error: BaseException) -> int:
        """Jinja writes the template's own lines into the traceback."""
        line, trace = 0, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._template.filename:
                line = trace.tb_lineno
            trace = trace.tb_next
        return line
