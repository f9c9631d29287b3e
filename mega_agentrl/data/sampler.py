"""Which prompts a step trains on: an endless stream over the dataset, epoch after epoch.

Every prompt comes once an epoch, or as often as its weight says (`shuffle`): that of its file, and
under `PromptOrder.difficulty` what was learned about it (`difficulty`). A rule may leave it out of
an epoch (`leave_out`): it is passed over then, and nothing else changes. A prompt is out from
`next` until it is settled or put back. The state is plain: the place in the stream, the prompts
that were put back, those that are out, which come first where the state is loaded, and the
accuracies that were recorded. It remembers a digest of the prompt ids, weights and order, so that
it is refused for another dataset. The rule is no part of it: whoever sets one sets it again.
Rollouts may take prompts in one thread while another records and saves.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mega_agentrl.config.choices import PromptOrder
from mega_agentrl.data.difficulty import difficulty_weights
from mega_agentrl.data.shuffle import ShuffledStream
from mega_agentrl.types.records import Prompt

_KEYS = ("accuracies", "digest", "num_left_out", "out", "returned", "stream")

LeaveOut = Callable[[int], Collection[str]]
"""From an epoch, counted from 0, to the ids of the prompts it goes without."""


class PromptSampler:
    """`ports.PromptSource` over prompts held in memory.

    num_left_out: how often a prompt was passed over so far.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        *,
        weights: Sequence[float] | None = None,
        order: PromptOrder = PromptOrder.shuffled,
    ) -> None:
        """weights: one for each prompt, how often it comes in an epoch; None for once."""
        if not prompts:
            raise ValueError("PromptSampler: got 0 prompts, expected at least 1; empty dataset?")
        self._prompts = tuple(prompts)
        self._weights = [1.0] * len(prompts) if weights is None else [float(w) for w in weights]
        if len(self._weights) != len(self._prompts):
            raise ValueError(
                f"PromptSampler: got {len(self._weights)} weights for {len(self._prompts)} "
                "prompts, expected one each"
            )
        self._lock = threading.Lock()
        self._learns = order is PromptOrder.difficulty
        self._accuracies: dict[int, float] = {}
        is_plain = not self._learns and set(self._weights) == {1.0}
        self._stream = ShuffledStream(
            len(self._prompts),
            seed,
            shuffle=order is not PromptOrder.file,
            weigh=None if is_plain else self._weigh,
        )
        self._index = {prompt.prompt_id: index for index, prompt in enumerate(self._prompts)}
        self._returned: list[int] = []
        self._out: list[int] = []
        self._rule: LeaveOut | None = None
        self._left_out: tuple[int, frozenset[str]] | None = None
        self.num_left_out = 0
        ids = "\n".join(prompt.prompt_id for prompt in self._prompts)
        if not is_plain or order is not PromptOrder.shuffled:
            ids += f"\n{order} {self._weights}"
        self._digest = hashlib.sha256(ids.encode()).hexdigest()

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """All of them, in the order of the dataset."""
        return self._prompts

    @property
    def epoch(self) -> int:
        """Of the prompt that the stream gave last, from 0."""
        return self._stream.epoch

    def leave_out(self, rule: LeaveOut | None) -> None:
        """From now on pass over what `rule` names; None: nothing.

        It is asked once for each epoch that is reached, or again where another rule is set. An
        epoch that would go without every prompt goes with all of them. Prompts that were put
        back are given again whatever it says.
        """
        with self._lock:
            self._rule, self._left_out = rule, None

    def record(self, accuracies: Mapping[str, float]) -> None:
        """Note how the policy did: shares of correct trajectories, in [0, 1], by prompt id.

        Counts from the next epoch on, and only where the order goes by it. Raises `ValueError`
        for a prompt of another dataset and for what is no share.
        """
        for prompt_id, accuracy in accuracies.items():
            if prompt_id not in self._index or not 0 <= accuracy <= 1:
                raise ValueError(
                    f"prompt {prompt_id}: got an accuracy of {accuracy}, expected one in [0, 1] "
                    "and a prompt of this sampler"
                )
            if self._learns:
                with self._lock:
                    self._accuracies[self._index[prompt_id]] = float(accuracy)

    def next(self, num_prompts: int) -> list[Prompt]:
        """The next prompts of the endless stream, those that were put back first."""
        with self._lock:
            taken, self._returned = self._returned[:num_prompts], self._returned[num_prompts:]
            while len(taken) < num_prompts:
                taken.append(self._take_one())
            self._out += taken
        return [self._prompts[index] for index in taken]

    def settle(self, prompts: Sequence[Prompt]) -> None:
        """These are done with; `ValueError` for one that is not out."""
        with self._lock:
            self._take_in(prompts)

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """`next` gives these first, in this order; `ValueError` for one that is not out."""
        with self._lock:
            self._returned = self._take_in(prompts) + self._returned

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes back."""
        with self._lock:
            return {
                "stream": self._stream.state_dict(),
                "returned": list(self._returned),
                "out": list(self._out),
                "num_left_out": self.num_left_out,
                "accuracies": {str(index): share for index, share in self._accuracies.items()},
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
                f"{self._digest[:12]}; data.train is not the dataset the run was saved with, "
                "or its weights or data.order are others"
            )
        waiting = [int(index) for index in (*state["out"], *state["returned"])]
        accuracies = {int(index): float(share) for index, share in state["accuracies"].items()}
        if not all(0 <= index < len(self._prompts) for index in (*waiting, *accuracies)):
            raise ValueError(
                f"sampler state: prompts {waiting} are out or put back, and {len(accuracies)} have "
                f"an accuracy; expected numbers in "
                f"0..{len(self._prompts) - 1}; the state is damaged"
            )
        self._stream.load_state_dict(state["stream"])
        self._returned, self._out, self._accuracies = waiting, [], accuracies
        self._left_out, self.num_left_out = None, int(state["num_left_out"])

    def _weigh(self) -> list[float]:
        """The weights of the epoch that begins."""
        return difficulty_weights(self._weights, self._accuracies)

    def _take_one(self) -> int:
        """The next index of the stream that its epoch does not leave out."""
        while True:
            (index,) = self._stream.take(1)
            if self._prompts[index].prompt_id not in self._names_left_out():
                return index
            self.num_left_out += 1

    def _names_left_out(self) -> frozenset[str]:
        """The prompts that the epoch of the last index goes without."""
        epoch = self._stream.epoch
        if self._rule is None:
            return frozenset()
        if self._left_out is None or self._left_out[0] != epoch:
            names = frozenset(self._rule(epoch))
            if all(prompt.prompt_id in names for prompt in self._prompts):
                names = frozenset()
            self._left_out = (epoch, names)
        return self._left_out[1]

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
