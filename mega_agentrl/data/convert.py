"""Which data sets can be converted to the RL format of `dataset`, and by what.

A source's name is the `data_source` of its rows, by which rewards are chosen, unless the rows
bring names of their own (Search-R1, ARPO). Rows in, rows out: reading and writing files is
`convert_file`, the command line `tools/convert_data.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mega_agentrl.data.convert_agentic import convert_agentic
from mega_agentrl.data.convert_answers import convert_arpo, convert_gsm8k, convert_search_r1
from mega_agentrl.data.convert_bfcl import convert_bfcl
from mega_agentrl.data.convert_row import Converted, SourceRow
from mega_agentrl.data.convert_xlam import convert_xlam


@dataclass(frozen=True, slots=True)
class Source:
    """A data set. has_calls: its ground truths are function calls."""

    convert: Callable[[Sequence[SourceRow], str], Converted]
    has_calls: bool


SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "function_calling": Source(convert_xlam, has_calls=True),
        "xlam-function-calling": Source(convert_xlam, has_calls=True),
        "bfcl": Source(convert_bfcl, has_calls=True),
        "open_agentic_tool_use": Source(convert_agentic, has_calls=True),
        "search_r1": Source(convert_search_r1, has_calls=False),
        "gsm8k": Source(convert_gsm8k, has_calls=False),
        "arpo": Source(convert_arpo, has_calls=False),
    }
)
"""By name: what `--source` may be."""


def convert(source: str, rows: Sequence[SourceRow]) -> Converted:
    """The rows in the RL format; raises ValueError for an unknown source or a malformed row."""
    if source not in SOURCES:
        raise ValueError(f"source={source}: expected one of {', '.join(SOURCES)}")
    return SOURCES[source].convert(rows, source)
