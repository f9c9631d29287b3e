"""Buffer of a growing trajectory: per-token sequences and the turns over them.

The tokens of a turn are appended first; closing the turn then spans them. In between the turn is
open. A fork starts from a copy of a prefix, which may end within a turn: then it is open again.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from mega_agentrl.types.images import images_within
from mega_agentrl.types.records import GenerationRoutes, Role, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.types.images import PlacedImage
    from mega_agentrl.types.records import Generation, ToolOutcome

NO_ARGMAX = -1
"""`argmax_ids` entry of a token that was not sampled."""


@dataclass(slots=True)
class TokenBuffer:
    """Per-token sequences of equal length N, as in `types.records.Trajectory`, and the turns."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    argmax_ids: array[int] = field(default_factory=lambda: array("i"))
    images: tuple[PlacedImage, ...] = ()
    """Images among the tokens, in order."""
    routes: tuple[GenerationRoutes, ...] = ()
    """Routes of the tokens and of the contexts before them, in order."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def open_turn_start(self) -> int:
        """Index of the open turn's first token; N if no turn is open."""
        return self.turns[-1].stop if self.turns else 0

    @property
    def num_assistant_turns(self) -> int:
        """Number of closed assistant turns."""
        return sum(turn.role is Role.assistant for turn in self.turns)

    def num_routed(self, context_start: int = 0) -> int:
        """Return how many leading tokens of the current context have known routes.

        `context_start` is the number of response tokens before the last reset of the context.
        """
        if not self.routes or self.routes[-1].response_start < context_start:
            return 0
        return self.routes[-1].routes.stop

    def append_sampled(self, generation: Generation) -> None:
        """Append sampled tokens to the open turn."""
        if (routes := generation.routes) is not None:
            # The last sampled token has no routes.
            context_length = routes.stop + 1 - len(generation.token_ids)
            self.routes += (
                GenerationRoutes(
                    response_start=len(self), context_length=context_length, routes=routes
                ),
            )
        self.token_ids.extend(generation.token_ids)
        self.logps.extend(generation.logps)
        self.entropies.extend(generation.entropies)
        self.argmax_ids.extend(generation.argmax_ids)
        self._append_token_metadata(len(generation.token_ids), mask=1, version=generation.version)
        if generation.versions:
            self.versions[-len(generation.versions) :] = generation.versions

    def close_turn(self, text: str) -> Turn:
        """Close the open assistant turn."""
        return self._append_turn(Role.assistant, text, None)

    def append_observation(
        self,
        token_ids: Sequence[int],
        text: str,
        outcome: ToolOutcome,
        role: Role = Role.tool,
        images: Sequence[PlacedImage] = (),
    ) -> Turn:
        """Append a message of a tool or user as a turn with loss mask, log-prob and entropy 0.

        A turn without tokens records an outcome that the policy is not shown; only such a turn may
        come first. The starts of `images` count `token_ids`.
        """
        self.images += tuple(placed.shifted(len(self)) for placed in images)
        self.token_ids.extend(token_ids)
        self.logps.extend([0.0] * len(token_ids))
        self.entropies.extend([0.0] * len(token_ids))
        self.argmax_ids.extend([NO_ARGMAX] * len(token_ids))
        self._append_token_metadata(
            len(token_ids), mask=0, version=self.versions[-1] if token_ids else 0
        )
        return self._append_turn(role, text, outcome)

    def prefix(self, length: int) -> TokenBuffer:
        """Return a copy of the first `length` tokens and of the turns and images within them.

        Raises:
            ValueError: the prefix ends within an image.
        """
        return TokenBuffer(
            token_ids=self.token_ids[:length],
            loss_mask=self.loss_mask[:length],
            logps=self.logps[:length],
            entropies=self.entropies[:length],
            versions=self.versions[:length],
            turn_ids=self.turn_ids[:length],
            turns=[turn for turn in self.turns if turn.stop <= length],
            argmax_ids=self.argmax_ids[:length],
            images=images_within(self.images, length),
            routes=tuple(
                part.before(length) for part in self.routes if part.response_start < length
            ),
        )

    def record_fields(self) -> dict[str, Any]:
        """Return the fields that a `Trajectory` of these tokens has, by name; nothing is copied."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self)}

    def _append_token_metadata(self, count: int, *, mask: int, version: int) -> None:
        self.loss_mask.extend([mask] * count)
        self.versions.extend([version] * count)
        self.turn_ids.extend([len(self.turns)] * count)

    def _append_turn(self, role: Role, text: str, outcome: ToolOutcome | None) -> Turn:
        turn = Turn(
            index=len(self.turns),
            role=role,
            start=self.open_turn_start,
            stop=len(self),
            text=text,
            outcome=outcome,
        )
        self.turns.append(turn)
        return turn
