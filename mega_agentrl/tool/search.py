"""The search tool over the local index.

With `top_k` 1 the answer is the best document's text; with more, one line each:
`Page i: title. text`. Texts are cut to `snippet_chars`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.tool.protocol import Tool, ToolAnswer
from mega_agentrl.tool.search_index import SearchIndex, read_corpus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.config.schema import SearchToolConfig
    from mega_agentrl.tool.search_index import Document

NOTHING_FOUND = "No search results found."


class SearchTool(Tool):
    """Looks a query up; builds its index from `config.corpus` at `start`."""

    name = "search"
    argument = "query"

    def __init__(self, config: SearchToolConfig) -> None:
        self._config = config
        self._index: SearchIndex | None = None
        self.deadline_s = config.timeout_s

    async def start(self) -> None:
        """Build the index; raises `ValueError` for a missing or malformed corpus."""
        path = Path(self._config.corpus)
        self._index = await asyncio.to_thread(lambda: SearchIndex(read_corpus(path)))

    async def execute(
        self, state: Any, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolAnswer:
        """Look `arguments["query"]` up."""
        if self._index is None:
            raise RuntimeError("tool search: execute before start")
        query, top_k = str(arguments["query"]), self._config.top_k
        found = await asyncio.to_thread(self._index.search, query, top_k)
        text = self._render(found) or NOTHING_FOUND
        return ToolAnswer(text=text, metrics={"num_found": float(len(found))})

    def _render(self, found: Sequence[Document]) -> str:
        snippets = [" ".join(d.text.split())[: self._config.snippet_chars].strip() for d in found]
        if self._config.top_k == 1:
            return snippets[0] if snippets else ""
        pages = zip(found, snippets, strict=True)
        return "\n".join(f"Page {i}: {d.title}. {text}" for i, (d, text) in enumerate(pages, 1))
