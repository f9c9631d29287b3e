"""Samples training prompts from a dataset, epoch after epoch, and can be resumed.

Every prompt occurs once per epoch or according to its weight (`index_stream`): the weight of its
file, times its learnability (`learnability_weights`) under `PromptOrder.difficulty`. A rule may
exclude prompts from an epoch; they are skipped, and the order of the others does not change. A
prompt that was returned is in flight until `ack` or `nack`. The state holds the position in the
stream, the prompts in flight or requeued, the recorded accuracies, a digest of prompt ids, weights
and order, and a digest of the rows of each file, which detect the state of another dataset. It does
not hold the exclusion rule. Methods may be called from several threads.

To add an order, add a member to `config.enums.PromptOrder`, compute its weights in `PromptSampler`
and test its properties in `tests/data/test_prompt_sampler.py`.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from mega_agentrl.config.enums import PromptOrder
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.data.index_stream import ShuffledIndexStream
from mega_agentrl.data.row_identity import FileDigest
from mega_agentrl.errors import InputError
from mega_agentrl.types.records import Prompt

_log = logging.getLogger(__name__)
_STATE_KEYS = ("accuracies", "digest", "in_flight", "num_excluded", "requeued", "stream")
_FILES_KEY = "files"
"""Key of the digests of files, which the states of older versions lack."""

ExclusionRule = Callable[[int], Collection[str]]
"""Maps an epoch, counted from 0, to the ids of the prompts to exclude from it."""

MIN_LEARNABILITY = 0.1
"""Minimum learnability: prompts with p = 0 or 1 still occur about every tenth epoch."""


def learnability_weights(base: Sequence[float], accuracies: Mapping[int, float]) -> list[float]:
    """Return the weights of the next epoch, which have the same sum as `base`.

    A group that is entirely correct or entirely wrong has no advantage to learn from, and the
    learning signal is largest near an accuracy p of 1/2. Each prompt's weight is that of its file
    times its learnability

        f(p) = max(MIN_LEARNABILITY, 4 p (1 - p)),    1 for a prompt without a recorded accuracy,

    scaled so that the length of an epoch does not change. p (1 - p) is used by Rutherford et al.
    (arXiv 2408.15099) and, for language models, by Foster et al. (arXiv 2502.12272). The minimum
    brings mastered and hopeless prompts back from time to time, since p is an old estimate from
    one group. p comes from the last visit and takes effect in the next epoch.

    Args:
        base: weight of each prompt's file.
        accuracies: recorded accuracies in [0, 1] by prompt index.
    """
    base_N = np.asarray(base, dtype=np.float64)
    learnability_N = np.ones_like(base_N)
    for index, accuracy in accuracies.items():
        learnability_N[index] = max(MIN_LEARNABILITY, 4 * accuracy * (1 - accuracy))
    weight_N = base_N * learnability_N
    weights: list[float] = (weight_N * (base_N.sum() / weight_N.sum())).tolist()
    return weights


class PromptSampler:
    """A `PromptSource` over prompts in memory."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        *,
        weights: Sequence[float] | None = None,
        order: PromptOrder = PromptOrder.shuffled,
        files: Sequence[FileDigest] = (),
        accept_changed_rows: bool = False,
    ) -> None:
        """Create the sampler at the start of epoch 0.

        Args:
            prompts: all prompts of the dataset.
            seed: seed of the order.
            weights: mean number of times that each prompt occurs per epoch; None for once.
            order: how to order and weigh the prompts.
            files: digests of the files of the prompts; without any, changed rows are not detected.
            accept_changed_rows: whether a state of other rows starts its epoch anew; otherwise it
                is an error.
        """
        if not prompts:
            raise InputError("prompts", 0, "at least 1", "an empty dataset")
        self._prompts = tuple(prompts)
        self._weights = [1.0] * len(prompts) if weights is None else [float(w) for w in weights]
        if len(self._weights) != len(self._prompts):
            expected = f"one for each of {len(self._prompts)} prompts"
            raise InputError("weights", len(self._weights), expected)
        self._lock = threading.Lock()
        self._weights_by_accuracy = order is PromptOrder.difficulty
        self._accuracies: dict[int, float] = {}
        is_plain = not self._weights_by_accuracy and set(self._weights) == {1.0}
        self._stream = ShuffledIndexStream(
            len(self._prompts),
            seed,
            shuffle=order is not PromptOrder.file,
            epoch_weights_fn=None if is_plain else self._epoch_weights,
        )
        self._index_by_id = {prompt.prompt_id: index for index, prompt in enumerate(self._prompts)}
        self._requeued: list[int] = []
        self._in_flight: list[int] = []
        self._exclusion_rule: ExclusionRule | None = None
        self._epoch_exclusion: tuple[int, frozenset[str]] | None = None
        self.num_excluded = 0
        """Number of skipped prompts so far; a prompt counts each time."""
        ids = "\n".join(prompt.prompt_id for prompt in self._prompts)
        if not is_plain or order is not PromptOrder.shuffled:
            ids += f"\n{order} {self._weights}"
        self._digest = hashlib.sha256(ids.encode()).hexdigest()
        self._files = tuple(files)
        self._accept_changed_rows = accept_changed_rows

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """All prompts in the order of the dataset."""
        return self._prompts

    @property
    def epoch(self) -> int:
        """Epoch of the last prompt from the stream, counted from 0."""
        return self._stream.epoch

    @property
    def num_epochs(self) -> float:
        """Number of epochs of prompts that are done; prompts in flight or requeued are not."""
        with self._lock:
            num_outstanding = len(self._requeued) + len(self._in_flight)
            return self._stream.num_epochs - num_outstanding / self._stream.epoch_size

    def exclude(self, rule: ExclusionRule | None) -> None:
        """Skip the prompts that `rule` names from now on; None skips none.

        The rule is evaluated once per epoch, and again when another rule is set. If it names all
        prompts of an epoch, none is skipped. Requeued prompts are returned whatever the rule says.
        """
        with self._lock:
            self._exclusion_rule, self._epoch_exclusion = rule, None

    def record_accuracies(self, accuracies: Mapping[str, float]) -> None:
        """Record the fraction of correct trajectories, in [0, 1], by prompt id.

        It affects the weights from the next epoch on, under `PromptOrder.difficulty` only.

        Raises:
            ValueError: a prompt is not in the dataset, or an accuracy is outside of [0, 1].
        """
        for prompt_id, accuracy in accuracies.items():
            if prompt_id not in self._index_by_id or not 0 <= accuracy <= 1:
                expected = "one in [0, 1], of a prompt of this sampler"
                raise InputError(f"accuracy of prompt {prompt_id}", accuracy, expected)
            if self._weights_by_accuracy:
                with self._lock:
                    self._accuracies[self._index_by_id[prompt_id]] = float(accuracy)

    def next_prompts(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts of the endless stream, requeued prompts first."""
        with self._lock:
            indices, self._requeued = self._requeued[:num_prompts], self._requeued[num_prompts:]
            while len(indices) < num_prompts:
                indices.append(self._next_index())
            self._in_flight += indices
        return [self._prompts[index] for index in indices]

    def ack(self, prompts: Sequence[Prompt]) -> None:
        """Acknowledge prompts as done; raise `ValueError` for one that is not in flight."""
        with self._lock:
            self._remove_in_flight(prompts)

    def nack(self, prompts: Sequence[Prompt]) -> None:
        """Requeue prompts in this order; raise `ValueError` for one that is not in flight."""
        with self._lock:
            self._requeued = self._remove_in_flight(prompts) + self._requeued

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        with self._lock:
            return {
                "stream": self._stream.state_dict(),
                "requeued": list(self._requeued),
                "in_flight": list(self._in_flight),
                "num_excluded": self.num_excluded,
                "accuracies": {str(index): value for index, value in self._accuracies.items()},
                "digest": self._digest,
                _FILES_KEY: [[file.path, file.digest] for file in self._files],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where the state was saved, starting with the prompts in flight.

        If the rows of a file have changed and this is accepted, the epoch of the state starts anew,
        and recorded accuracies are lost.

        Raises:
            ValueError: the state is damaged, or of another dataset or order.
        """
        if set(state) - {_FILES_KEY} != set(_STATE_KEYS):
            expected, cause = f"the keys {list(_STATE_KEYS)}", "it is from another version"
            raise InputError("sampler state", sorted(state), expected, cause)
        if changed_files := self._changed_files(state.get(_FILES_KEY) or ()):
            self._start_epoch_anew(state, changed_files)
            return
        if state["digest"] != self._digest:
            raise InputError(
                "sampler state, digest",
                state["digest"][:12],
                self._digest[:12],
                "data.train is not the dataset the run was saved with, or its weights, data.order "
                "or the number of overlong prompts have changed",
            )
        requeued = [int(index) for index in (*state["in_flight"], *state["requeued"])]
        accuracies = {int(index): float(value) for index, value in state["accuracies"].items()}
        if not all(0 <= index < len(self._prompts) for index in (*requeued, *accuracies)):
            raise InputError(
                "sampler state, indices of prompts",
                f"{requeued} in flight or requeued, and {len(accuracies)} with an accuracy",
                f"indices in 0..{len(self._prompts) - 1}",
                "the state is damaged",
            )
        self._stream.load_state_dict(state["stream"])
        self._requeued, self._in_flight, self._accuracies = requeued, [], accuracies
        self._epoch_exclusion, self.num_excluded = None, int(state["num_excluded"])

    def _changed_files(self, saved: Sequence[Sequence[str]]) -> list[str]:
        """Return the files whose rows are not those of a state; [] if either has no digests."""
        if not saved or not self._files:
            return []
        pairs = zip_longest(saved, [(file.path, file.digest) for file in self._files])
        return [
            str((now or before)[0])
            for before, now in pairs
            if before is None or now is None or before[1] != now[1]
        ]

    def _start_epoch_anew(self, state: Mapping[str, Any], changed_files: Sequence[str]) -> None:
        names = ", ".join(changed_files)
        if not self._accept_changed_rows:
            raise ConfigError(
                "data.train",
                f"other rows in {names}",
                "the rows that the run was saved with, in their order; "
                "data.accept_changed_rows=true starts the epoch anew with the rows as they are",
                "the file was written again since the last checkpoint, or an image that it names",
            )
        epoch = int(state["stream"]["epoch"])
        _log.warning("data.train: other rows in %s; epoch %s starts anew with them", names, epoch)
        self._stream.start_epoch(epoch)
        self._requeued, self._in_flight, self._accuracies = [], [], {}
        self._epoch_exclusion, self.num_excluded = None, int(state["num_excluded"])

    def _epoch_weights(self) -> list[float]:
        """Return the weights of the epoch that starts."""
        return learnability_weights(self._weights, self._accuracies)

    def _next_index(self) -> int:
        """Return the next index that its epoch does not exclude."""
        while True:
            (index,) = self._stream.take(1)
            if self._prompts[index].prompt_id not in self._excluded_ids():
                return index
            self.num_excluded += 1

    def _excluded_ids(self) -> frozenset[str]:
        """Return the ids of the prompts excluded from the current epoch."""
        epoch = self._stream.epoch
        if self._exclusion_rule is None:
            return frozenset()
        if self._epoch_exclusion is None or self._epoch_exclusion[0] != epoch:
            excluded = frozenset(self._exclusion_rule(epoch))
            if all(prompt.prompt_id in excluded for prompt in self._prompts):
                excluded = frozenset()
            self._epoch_exclusion = (epoch, excluded)
        return self._epoch_exclusion[1]

    def _remove_in_flight(self, prompts: Sequence[Prompt]) -> list[int]:
        """Remove prompts from the in-flight list and return their indices."""
        indices = []
        for prompt in prompts:
            index = next((i for i in self._in_flight if self._prompts[i] is prompt), None)
            if index is None:
                raise InputError(
                    f"prompt {prompt.prompt_id}",
                    "one that is not in flight",
                    "one that `next_prompts` returned and that was neither acked nor nacked",
                    "two acks",
                )
            self._in_flight.remove(index)
            indices.append(index)
        return indices
