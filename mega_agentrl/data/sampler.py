"""Which prompts a step trains on: an endless reshuffled stream over the dataset.

Every prompt comes once an epoch. A prompt is out from `next` until it is settled or put back.
The state is small and plain: the place in the stream, the prompts that were put back, and those
that are out, which come first where the state is loaded. It remembers a digest of the prompt
ids, so that it is refused for another dataset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from mega_agentrl.data.shuffle import ShuffledStream
from mega_agentrl.types.records import Prompt

_KEYS = ("digest", "out", "returned", "stream")


class PromptSampler:
    """`ports.PromptSource` over prompts held in memory."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise ValueError("PromptSampler: got 0 prompts, expected at least 1; empty dataset?")
        self._prompts = tuple(prompts)
        self._stream = ShuffledStream(len(self._prompts), seed)
        self._returned: list[int] = []
        self._out: list[int] = []
        ids = "\n".join(prompt.prompt_id for prompt in self._prompts)
        self._digest = hashlib.sha256(ids.encode()).hexdigest()

    def next(self, num_prompts: int) -> list[Prompt]:
        """The next prompts of the endless shuffled stream, those that were put back first."""
        taken, self._returned = self._returned[:num_prompts], self._returned[num_prompts:]
        taken += self._stream.take(num_prompts - len(taken))
        self._out += taken
        return [self._prompts[index] for index in taken]

    def settle(self, prompts: Sequence[Prompt]) -> None:
        """These are done with; `ValueError` for one that is not out."""
        self._take_in(prompts)

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """`next` gives these first, in this order; `ValueError` for one that is not out."""
        self._returned = self._take_in(prompts) + self._returned

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes back."""
        return {
            "stream": self._stream.state_dict(),
            "returned": list(self._returned),
            "out": list(self._out),
            "digest": self._digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the state was taken, beginning with what was out."""
        if set(state) != set(_KEYS):
            raise ValueError(
                f"sampler state: got keys {sorted(state)}, expected {list(_KEYS)}; "
                "is it from another version?"
            )
        if state["digest"] != self._digest:
            raise ValueError(
                f"sampler state: prompt digest {state['digest'][:12]}, expected "
                f"{self._digest[:12]}; data.train is not the dataset the run was saved with"
            )
        waiting = [int(index) for index in (*state["out"], *state["returned"])]
        if not all(0 <= index < len(self._prompts) for index in waiting):
            raise ValueError(
                f"sampler state: prompts {waiting} are out or put back, expected numbers in "
                f"0..{len(self._prompts) - 1}; the state is damaged"
            )
        self._stream.load_state_dict(state["stream"])
        self._returned, self._out = waiting, []

    def _take_in(self, prompts: Sequence[Prompt]) -> list[int]:
        """Indices of prompts that are out, which they are no longer."""
        taken = []
        for prompt in prompts:
            index = next((i for i in self._out if self._prompts[i] is prompt), None)
            if index is None:
                raise ValueError(
                    f"prompt {prompt.prompt_id}: it is not out, expected one that `next` gave and "
                    "nobody settled or put back; probable cause: it was settled twice"
                )
            self._out.remove(index)
            taken.append(index)
        return taken
