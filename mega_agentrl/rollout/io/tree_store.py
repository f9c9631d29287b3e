"""Append-only file of finished trees, from which a run restores them after a crash.

A restarted run samples again everything after its last checkpoint. Prompts and seeds are the same
then, so a finished tree is restored from this file instead, if the weight versions of its tokens
are close enough to the version served now. Trees are stored without scores, which are computed
again, and only if no trajectory failed, so that failed ones are sampled again. A store is
thread-safe: rollouts add trees while a checkpoint drops others.

The file is a `types.journal` of msgpack records (JSON, if a value has no form in it), one a tree:

    {"fields": ["Trajectory.path", ...], "step", "key", "versions": [oldest, newest], "prompt",
     "trajectories": [...], "greedy": null, "turns": [...], "files": [...], "routes": [...], ...}

Turns, images and routes that trajectories share are stored once; the trajectories have their
numbers. Of the prompt there is a digest only. The file is data: it is read into the types of the
records, and what does not fit is dropped with a warning and sampled again. A record of an earlier
version is read if the fields that it lacks have defaults; one with unknown fields is dropped.
"""

from __future__ import annotations

import json
import logging
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from mega_agentrl.errors import InputError, abbreviate
from mega_agentrl.rollout.io.nodes import check_turns
from mega_agentrl.rollout.io.tree_file import stored_class
from mega_agentrl.types.images import ImageInput, PlacedImage
from mega_agentrl.types.journal import Journal
from mega_agentrl.types.records import (
    BranchDecision,
    ContextReset,
    GenerationRoutes,
    Prompt,
    RolloutTree,
    Score,
    ToolOutcome,
    Trajectory,
    Turn,
)
from mega_agentrl.types.routes import TokenRoutes
from mega_agentrl.types.serialization import PLAIN_TYPES

if TYPE_CHECKING:
    from pathlib import Path


_RECORDS = (
    RolloutTree,
    Trajectory,
    Turn,
    ToolOutcome,
    Score,
    BranchDecision,
    ContextReset,
    GenerationRoutes,
    TokenRoutes,
    PlacedImage,
    ImageInput,
)
_FIELDS = [f"{record.__name__}.{spec.name}" for record in _RECORDS for spec in fields(record)]
_ARRAY_TYPES = ("|u1", "<u2", "<u4")
"""Types of the arrays of `TokenRoutes`."""
_NUMBER_BYTES = 4

_logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class _Head:
    """The part of a record by which a tree is found."""

    fields: list[str]
    """`_FIELDS` of the version that wrote the record."""
    step: str
    """Name of the pass."""
    key: str
    """Name of the prompt, unique in the pass."""
    versions: tuple[int, int]
    """Oldest and newest weight version of the sampled tokens."""
    prompt: str
    """`_prompt_digest`."""


@dataclass(slots=True, kw_only=True, frozen=True)
class _StoredArray:
    """An array of numbers."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


PlacedNumber = tuple[int, int]
"""Start of a `PlacedImage`, and the number of its image among the files."""

_RESET_FIELDS = ("images",)
_StoredReset = stored_class(ContextReset, _RESET_FIELDS, images=list[PlacedNumber])
_TRAJECTORY_FIELDS = ("prompt", "turns", "images", "routes", "context_resets")
_StoredTrajectory = stored_class(
    Trajectory,
    _TRAJECTORY_FIELDS,
    turns=list[int],
    images=list[PlacedNumber],
    routes=list[int],
    context_resets=list[_StoredReset],  # type: ignore[valid-type]
)
_TREE_FIELDS = ("prompt", "trajectories", "greedy_trajectory")
_TABLES = {
    "turns": list[Turn],
    "files": list[bytes | ImageInput],
    "routes": list[GenerationRoutes],
}
_StoredTree = stored_class(
    RolloutTree,
    _TREE_FIELDS,
    trajectories=list[_StoredTrajectory],  # type: ignore[valid-type]
    greedy=_StoredTrajectory | None,
    **_TABLES,
)


class TreeStore:
    """Stores trees by step and key (name of the prompt in its step) in the file `path`."""

    def __init__(self, path: Path) -> None:
        """Index the records of the file; those that cannot be read are dropped with a warning."""
        self._journal = Journal(path)
        self._lock = threading.RLock()
        # Head and offset by step and key.
        self._index: dict[tuple[str, str], tuple[_Head, int]] = {}
        num_records, reason = 0, ""
        for offset, head in self._journal.recover(_read_head):
            num_records += 1
            if isinstance(head, _Head):
                self._index[head.step, head.key] = (head, offset)
            else:
                reason = head
        if reason:
            _logger.warning(
                "%s: trees that cannot be read are sampled again, %d of %d are kept: %s",
                path,
                len(self._index),
                num_records,
                reason,
            )
        if len(self._index) < num_records:
            self._rewrite_with(list(self._index), is_forced=True)

    def __len__(self) -> int:
        return len(self._index)

    def put(self, step: str, key: str, version: int, tree: RolloutTree) -> None:
        """Store a finished tree, unless one of its trajectories failed.

        A tree with values that no record can hold, such as an object of the user's, is left out
        with a warning.

        Args:
            step: Name of the pass.
            key: Name of the prompt, unique in the pass.
            version: Weight version of a tree without sampled tokens.
            tree: The tree, unscored.
        """
        sampled = {
            token_version
            for trajectory in tree.trajectories
            for token_version, mask in zip(trajectory.versions, trajectory.loss_mask, strict=True)
            if mask
        }
        if any(trajectory.failed for trajectory in tree.trajectories):
            return
        try:
            head = _Head(
                fields=_FIELDS,
                step=step,
                key=key,
                versions=(min(sampled, default=version), max(sampled, default=version)),
                prompt=_prompt_digest(tree.prompt),
            )
            body = _encode(_values(head) | _tree_values(tree))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            _logger.warning(
                "%s: the tree of prompt %s is not kept for a restart: %s",
                self._journal.path,
                tree.prompt.prompt_id,
                abbreviate(str(error)),
            )
            return
        with self._lock:
            self._index[step, key] = (head, self._journal.append(body))

    def get(
        self, step: str, key: str, prompt: Prompt, *, oldest: int, newest: int
    ) -> RolloutTree | None:
        """Restore the tree of a prompt, or return None if there is no suitable one.

        Args:
            step: Name of the pass.
            key: Name of the prompt, unique in the pass.
            prompt: The prompt; the tree refers to this object and not to a copy.
            oldest: Oldest permitted weight version of its tokens.
            newest: Newest permitted weight version of its tokens.
        """
        with self._lock:
            if (step, key) not in self._index:
                return None
            head, offset = self._index[step, key]
            if head.versions[0] < oldest or head.versions[1] > newest:
                return None
            if head.prompt != _prompt_digest(prompt):
                return None
            try:
                return _restore_tree(_decode(self._journal.read(offset), _StoredTree), prompt)
            except (ValueError, OverflowError) as error:
                _logger.warning(
                    "%s: the tree of prompt %s cannot be read and is sampled again: %s",
                    self._journal.path,
                    prompt.prompt_id,
                    abbreviate(str(error)),
                )
                return None

    def drop_steps(self, steps: frozenset[str] | None = None) -> None:
        """Drop the trees of steps that a checkpoint covers; None drops all."""
        with self._lock:
            self._rewrite_with(
                [entry for entry in self._index if steps is not None and entry[0] not in steps]
            )

    def drop_newer_than(self, version: int) -> None:
        """Drop trees with newer tokens: their weights are lost and the versions will be reused."""
        with self._lock:
            self._rewrite_with(
                [entry for entry, (head, _) in self._index.items() if head.versions[1] <= version]
            )

    def _rewrite_with(self, entries: list[tuple[str, str]], *, is_forced: bool = False) -> None:
        if not entries:
            self._index = {}
            self._journal.path.unlink(missing_ok=True)
            return
        if len(entries) == len(self._index) and not is_forced:
            return
        offsets = self._journal.rewrite(
            self._journal.read(self._index[entry][1]) for entry in entries
        )
        self._index = {
            entry: (self._index[entry][0], offset)
            for entry, offset in zip(entries, offsets, strict=True)
        }

    @property
    def steps(self) -> frozenset[str]:
        """Steps that have stored trees."""
        with self._lock:
            return frozenset(step for step, _ in self._index)


class _Table(list[Any]):
    """Objects that records refer to by their numbers; one that is added again keeps its number."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Any, int] = {}

    def add(self, item: Any) -> int:
        """Return the number of the item."""
        key = item if isinstance(item, bytes) else id(item)
        if key not in self._numbers:
            self._numbers[key] = len(self)
            self.append(item)
        return self._numbers[key]


def _tree_values(tree: RolloutTree) -> dict[str, Any]:
    """Return the fields of a `_StoredTree`."""
    turns, images, routes = _Table(), _Table(), _Table()

    def placed_numbers(placed: Sequence[PlacedImage]) -> list[PlacedNumber]:
        return [(one.start, images.add(one.image)) for one in placed]

    def trajectory_values(trajectory: Trajectory) -> dict[str, Any]:
        resets = [
            _values(reset, _RESET_FIELDS) | {"images": placed_numbers(reset.images)}
            for reset in trajectory.context_resets
        ]
        return _values(trajectory, _TRAJECTORY_FIELDS) | {
            "turns": [turns.add(turn) for turn in trajectory.turns],
            "images": placed_numbers(trajectory.images),
            "routes": [routes.add(one) for one in trajectory.routes],
            "context_resets": resets,
        }

    greedy = tree.greedy_trajectory
    values = _values(tree, _TREE_FIELDS) | {
        "trajectories": [trajectory_values(trajectory) for trajectory in tree.trajectories],
        "greedy": None if greedy is None else trajectory_values(greedy),
    }
    stored_turns = [
        _replace_images(turn, lambda image: images.add(image).to_bytes(_NUMBER_BYTES))
        for turn in turns
    ]
    for index, image in enumerate(images):  # it grows: an image that a tool made has a file
        if isinstance(image, ImageInput):
            data = images.add(image.data).to_bytes(_NUMBER_BYTES) if image.data else b""
            images[index] = replace(image, data=data, pixels_HWC=None)
    return values | {"turns": stored_turns, "files": list(images), "routes": list(routes)}


def _restore_tree(stored: Any, prompt: Prompt) -> RolloutTree:
    """Return the tree of a `_StoredTree`.

    Raises:
        ValueError: A number has no object, or the fields of a trajectory do not fit together.
        OverflowError: A number is too large.
    """

    def file(number: bytes) -> bytes:
        found = _at(stored.files, int.from_bytes(number))
        if not isinstance(found, bytes):
            raise InputError("the file of an image", "the record of an image", "its bytes")
        return found

    def image(number: int) -> ImageInput:
        found = _at(images, number)
        if not isinstance(found, ImageInput):
            raise InputError("an image of a trajectory", "a file", "the record of an image")
        return found

    images = [
        replace(one, data=file(one.data)) if isinstance(one, ImageInput) and one.data else one
        for one in stored.files
    ]
    turns = [
        _replace_images(turn, lambda number: _at(images, int.from_bytes(number)))
        for turn in stored.turns
    ]

    def placed(numbers: Sequence[PlacedNumber]) -> tuple[PlacedImage, ...]:
        return tuple(PlacedImage(start=start, image=image(number)) for start, number in numbers)

    def trajectory(one: Any) -> Trajectory:
        resets = tuple(
            ContextReset(**vars(reset) | {"images": placed(reset.images)})
            for reset in one.context_resets
        )
        restored = Trajectory(
            **vars(one)
            | {
                "prompt": prompt,
                "turns": [_at(turns, number) for number in one.turns],
                "images": placed(one.images),
                "routes": tuple(_at(stored.routes, number) for number in one.routes),
                "context_resets": resets,
                "argmax_ids": array("i", one.argmax_ids),
            }
        )
        check_turns(restored)
        return restored

    own = {name: value for name, value in vars(stored).items() if name not in _TABLES}
    greedy = own.pop("greedy")
    return RolloutTree(
        **own
        | {
            "prompt": prompt,
            "trajectories": [trajectory(one) for one in stored.trajectories],
            "greedy_trajectory": None if greedy is None else trajectory(greedy),
        }
    )


def _at[ItemT](table: Sequence[ItemT], number: int) -> ItemT:
    if not 0 <= number < len(table):
        raise InputError("a number in a record", number, f"one of the {len(table)} stored objects")
    return table[number]


def _replace_images(turn: Turn, change: Callable[[Any], Any]) -> Turn:
    """Return the turn with other images in its outcome."""
    if turn.outcome is None or not turn.outcome.images:
        return turn
    images = tuple(change(image) for image in turn.outcome.images)
    return replace(turn, outcome=replace(turn.outcome, images=images))


def _values(record: Any, leave_out: Sequence[str] = ()) -> dict[str, Any]:
    names = [spec.name for spec in fields(record) if spec.name not in leave_out]
    return {name: getattr(record, name) for name in names}


def _prompt_digest(prompt: Prompt) -> str:
    """Return a digest of all fields; objects without a plain form count by their text."""
    return sha256(_encode(prompt, fallback=repr)).hexdigest()


def _encode(value: Any, fallback: Callable[[Any], Any] | None = None) -> bytes:
    """Return a record as msgpack.

    JSON takes its place for texts that UTF-8 cannot encode and numbers of more than 64 bits.
    """

    def convert_other(other: Any) -> Any:
        if isinstance(other, np.ndarray):
            contents = np.ascontiguousarray(other)
            return {"dtype": other.dtype.str, "shape": other.shape, "data": contents.tobytes()}
        for kind, plain_type in PLAIN_TYPES:
            if isinstance(other, kind):
                return plain_type(other)
        if fallback is None:
            raise TypeError(f"got {type(other).__name__}, expected numbers, text and records")
        return fallback(other)

    try:
        return msgspec.msgpack.encode(value, enc_hook=convert_other)
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(msgspec.to_builtins(value, enc_hook=convert_other)).encode()


def _decode[HeadT](body: bytes, kind: type[HeadT]) -> HeadT:
    """Read a record as `kind`.

    Raises:
        ValueError: It does not fit.
    """
    try:
        if body[:1] == b"{":
            return msgspec.convert(json.loads(body), kind, dec_hook=_decode_other)
        return msgspec.msgpack.decode(body, type=kind, dec_hook=_decode_other)
    except (msgspec.MsgspecError, OverflowError, RecursionError) as error:
        raise InputError(
            "a stored tree", abbreviate(str(error)), "a record of this version"
        ) from None


def _decode_other(kind: type, value: Any) -> Any:
    """Return the array that `_encode` has written."""
    if kind is not np.ndarray:
        raise TypeError(f"no form of {kind}")
    stored = msgspec.convert(value, _StoredArray)
    if stored.dtype not in _ARRAY_TYPES or min(stored.shape, default=0) < 0:
        raise ValueError(f"an array of {stored.dtype}, {stored.shape}")
    dtype = np.dtype(stored.dtype)
    if prod(stored.shape) * dtype.itemsize != len(stored.data):
        raise ValueError(f"{len(stored.data)} bytes of an array of {stored.dtype}, {stored.shape}")
    return np.frombuffer(bytearray(stored.data), dtype=dtype).reshape(stored.shape)


def _read_head(body: bytes) -> _Head | str:
    """Return the head of a record, or why it cannot be read."""
    try:
        head = _decode(body, _Head)
    except ValueError as error:
        return str(error)
    unknown = sorted(set(head.fields) - set(_FIELDS))
    return f"unknown fields {abbreviate(unknown)} of another version" if unknown else head
