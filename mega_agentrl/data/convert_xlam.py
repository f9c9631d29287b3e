"""xLAM function calling: `query`, and `tools` and `answers` as JSON text, one row a question.

The same shape under another name is what `function_calling` rows are.
"""

from __future__ import annotations

from collections.abc import Sequence

from mega_agentrl.data.convert_calls import calls_text, read_call, system_message
from mega_agentrl.data.convert_row import Converted, SourceRow, rl_row, unique_index


def convert_xlam(rows: Sequence[SourceRow], data_source: str) -> Converted:
    """One RL row for each; raises ValueError that names the row and field."""
    seen: set[str] = set()
    converted = []
    for place, row in enumerate(rows):
        answers = [read_call(value, row, "answers") for value in row.items("answers")]
        converted.append(
            rl_row(
                data_source=data_source,
                messages=(
                    system_message(row.items("tools")),
                    {"role": "user", "content": row.text("query")},
                ),
                ground_truth=calls_text(answers, row, "answers"),
                ability="function_calling",
                extra_info={"index": unique_index(row, place, seen), "num_calls": len(answers)},
            )
        )
    return Converted(converted)
