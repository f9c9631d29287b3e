"""The tape of a trajectory while it grows: per-token sequences and the turns over them.

Tokens of a turn are added first, the turn is closed over them afterwards; in between the turn
is open. A prefix that ends between two turns can be copied: that is what a fork starts from.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mega_agentrl.types.records import Author, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.types.records import Generation, ToolOutcome

NO_ARGMAX = -1


@dataclass(slots=True)
class Tape:
    """All sequences have length N, see `types.records.Trajectory`."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    argmax_ids: array[int] = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def open_from(self) -> int:
        """Where the open turn starts; N where none is open."""
        return self.turns[-1].stop if self.turns else 0

    @property
    def num_said(self) -> int:
        """Closed turns of the assistant."""
        return sum(turn.author is Author.assistant for turn in self.turns)

    def add_sampled(self, generation: Generation) -> None:
        """Append sampled tokens to the open turn."""
        self.token_ids.extend(generation.token_ids)
        self.logps.extend(generation.logps)
        self.entropies.extend(generation.entropies)
        self.argmax_ids.extend(generation.argmax_ids)
        self._fill(len(generation.token_ids), mask=1, version=generation.version)
        if generation.versions:
            self.versions[-len(generation.versions) :] = generation.versions

    def close_turn(self, text: str) -> Turn:
        """Close the open turn of the assistant."""
        return self._close(Author.assistant, text, None)

    def add_tool(
        self,
        token_ids: Sequence[int],
        text: str,
        outcome: ToolOutcome,
        author: Author = Author.tool,
    ) -> Turn:
        """Append what a tool or user says as a turn of its own: no loss, log-prob, entropy 0.

        Without tokens it is a note about what happened, which may come first.
        """
        self.token_ids.extend(token_ids)
        self.logps.extend([0.0] * len(token_ids))
        self.entropies.extend([0.0] * len(token_ids))
        self.argmax_ids.extend([NO_ARGMAX] * len(token_ids))
        self._fill(len(token_ids), mask=0, version=self.versions[-1] if token_ids else 0)
        return self._close(author, text, outcome)

    def prefix(self, length: int) -> Tape:
        """A copy of the first `length` tokens and of the turns within them."""
        return Tape(
            token_ids=self.token_ids[:length],
            loss_mask=self.loss_mask[:length],
            logps=self.logps[:length],
            entropies=self.entropies[:length],
            versions=self.versions[:length],
            turn_ids=self.turn_ids[:length],
            turns=[turn for turn in self.turns if turn.stop <= length],
            argmax_ids=self.argmax_ids[:length],
        )

    def _fill(self, count: int, *, mask: int, version: int) -> None:
        self.loss_mask.extend([mask] * count)
        self.versions.extend([version] * count)
        self.turn_ids.extend([len(self.turns)] * count)

    def _close(self, author: Author, text: str, outcome: ToolOutcome | None) -> Turn:
        turn = Turn(
            index=len(self.turns),
            author=author,
            start=self.open_from,
            stop=len(self),
            text=text,
            outcome=outcome,
        )
        self.turns.append(turn)
        return turn
