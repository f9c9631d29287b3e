"""Which prompts a step trains on: an endless reshuffled stream over the dataset.

Every prompt comes once an epoch. The state is small and plain; it remembers a digest of the
prompt ids, so that it is refused for another dataset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from mega_agentrl.data.shuffle import ShuffledStream
from mega_agentrl.types.records import Prompt


class PromptSampler:
    """`ports.PromptSource` over prompts held in memory."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise ValueError("PromptSampler: got 0 prompts, expected at least 1; empty dataset?")
        self._prompts = tuple(prompts)
        self._stream = ShuffledStream(len(self._prompts), seed)
        ids = "\n".join(prompt.prompt_id for prompt in self._prompts)
        self._digest = hashlib.sha256(ids.encode()).hexdigest()

    def next(self, num_prompts: int) -> list[Prompt]:
        """The next prompts of the endless shuffled stream."""
        return [self._prompts[index] for index in self._stream.take(num_prompts)]

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes back."""
        return {"stream": self._stream.state_dict(), "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the state was taken."""
        if set(state) != {"stream", "digest"}:
            raise ValueError(
                f"sampler state: got keys {sorted(state)}, expected ['digest', 'stream']; "
                "is it from another version?"
            )
        if state["digest"] != self._digest:
            raise ValueError(
                f"sampler state: prompt digest {state['digest'][:12]}, expected "
                f"{self._digest[:12]}; data.train is not the dataset the run was saved with"
            )
        self._stream.load_state_dict(state["stream"])
