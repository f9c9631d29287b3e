"""Converts xLAM function calling: `query`, and `tools` and `answers` as JSON text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mega_agentrl.data.converters.function_calls import (
    format_calls_json,
    make_system_message,
    parse_json_call,
)
from mega_agentrl.data.converters.source_row import (
    ConversionResult,
    SourceRow,
    convert_each,
    make_rl_row,
    unique_row_id,
)


def convert_xlam(rows: Sequence[SourceRow], data_source: str) -> ConversionResult:
    """Convert the rows, each to one RL row (`convert_each`)."""
    row_ids: set[str] = set()

    def convert(row: SourceRow, place: int) -> list[dict[str, Any]]:
        answers = [parse_json_call(value, row, "answers") for value in row.get_list("answers")]
        made = make_rl_row(
            data_source=data_source,
            messages=(
                make_system_message(row.get_list("tools")),
                {"role": "user", "content": row.get_text("query")},
            ),
            ground_truth=format_calls_json(answers, row, "answers"),
            ability="function_calling",
            extra_info={"index": unique_row_id(row, place, row_ids), "num_calls": len(answers)},
        )
        return [made]

    return convert_each(rows, convert)
