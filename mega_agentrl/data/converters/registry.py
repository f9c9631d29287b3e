"""Registry of the data sets that can be converted to the RL format of `rl_dataset`.

The name of a source becomes the `data_source` of its rows, by which rewards are chosen, unless the
rows have names of their own (Search-R1, ARPO). Files are read and written by `file_io`; the command
line is `tools/convert_data.py`.

To add a data set:

1. Write a function from source rows to a `ConversionResult` in a new file here, as in `xlam`.
2. Add it to `SOURCES`, whose names are the choices of `--source`.
3. Add data sets of function calls to `FUNCTION_CALL_SOURCES` in `config/sections/reward.py`.
4. Test hand-written valid and malformed rows, as in `tests/data/converters/test_xlam.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mega_agentrl.data.converters.bfcl import convert_bfcl, convert_bfcl_conversations
from mega_agentrl.data.converters.image_questions import (
    convert_chartqa,
    convert_geometry3k,
    convert_virl39k,
)
from mega_agentrl.data.converters.open_agentic import convert_agentic
from mega_agentrl.data.converters.question_answering import (
    convert_arpo,
    convert_gsm8k,
    convert_search_r1,
)
from mega_agentrl.data.converters.source_row import ConversionResult, SourceRow
from mega_agentrl.data.converters.xlam import convert_xlam
from mega_agentrl.errors import InputError


@dataclass(frozen=True, slots=True)
class SourceDataset:
    """A data set that can be converted."""

    convert: Callable[[Sequence[SourceRow], str], ConversionResult]
    """Converts rows; the second argument is the name of the source."""
    has_calls: bool
    """Whether the ground truths are function calls."""


SOURCES: Mapping[str, SourceDataset] = MappingProxyType(
    {
        "function_calling": SourceDataset(convert_xlam, has_calls=True),
        "xlam-function-calling": SourceDataset(convert_xlam, has_calls=True),
        "bfcl": SourceDataset(convert_bfcl, has_calls=True),
        "bfcl_multi_turn": SourceDataset(convert_bfcl_conversations, has_calls=False),
        "open_agentic_tool_use": SourceDataset(convert_agentic, has_calls=True),
        "search_r1": SourceDataset(convert_search_r1, has_calls=False),
        "gsm8k": SourceDataset(convert_gsm8k, has_calls=False),
        "arpo": SourceDataset(convert_arpo, has_calls=False),
        "geometry3k": SourceDataset(convert_geometry3k, has_calls=False),
        "chartqa": SourceDataset(convert_chartqa, has_calls=False),
        "virl39k": SourceDataset(convert_virl39k, has_calls=False),
    }
)
"""Data sets by name, the values of `--source`."""


def convert_rows(source: str, rows: Sequence[SourceRow]) -> ConversionResult:
    """Convert rows; raise `ValueError` for an unknown source, or if all rows are malformed."""
    if source not in SOURCES:
        raise InputError("--source", source, f"one of {', '.join(SOURCES)}")
    return SOURCES[source].convert(rows, source)
