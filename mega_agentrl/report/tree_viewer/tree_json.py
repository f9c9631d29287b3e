"""Convert a rollout tree to the JSON of the page's tree viewer.

A shared prefix is stored once, with the path that sampled it. Keys are short to save space::

    {"id", "source", "question": [{"role", "text", "images": [0]}], "truth", "size",
     "images": [{"label": "56 x 28 pixels, 2 tokens", "src": "data:..."}], "paths": [
      {"name": "0.1", "parent": 0, "lane": 1, "fork": 10, "end": 30, "stop": "eos",
       "reward", "correct", "advantage", ..., "decisions": [{"at", "dh", "p", "tau", ...}],
       "turns": [{"by": "assistant", "from": 10, "to": 14, "text": "...",
                  "pieces": ["a", ...], "h": [...], "lp": [...], "v": 3, "sampled": 1},
                 {"by": "tool", ..., "call": {"tool", "status", "s", ...}, "images": [1]}]}]}

The lists `images` of messages and turns count the list of the tree (`thumbnails`); they are absent
where there are none. `h`, `lp`, `v` and `sampled` have one value per token, or a single value if
all are equal. Entropies and log-probs are rounded to four digits. `page.html.json_for_script`
escapes the text.

Lane 0 is at the top. A path is followed by its forks, the latest fork first, each with its own
forks. The line from a parent down to a fork then crosses no lane that starts before it::

    lane 0   0    ----------+-----+----->     forked at 10 (path 0.0) and at 16 (path 0.1)
    lane 1   0.1            |     +------->
    lane 2   0.0            +-------->
    lane 3   1    -------------->             another root
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mega_agentrl.errors import InputError
from mega_agentrl.report.tree_viewer.thumbnails import TreeThumbnails
from mega_agentrl.types.ground_truth import ground_truth_text
from mega_agentrl.types.images import ImageInput
from mega_agentrl.types.records import Role
from mega_agentrl.vision.placeholders import content_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from mega_agentrl.types.records import (
        BranchDecision,
        Message,
        Prompt,
        RolloutTree,
        ToolOutcome,
        Trajectory,
        Turn,
    )

MAX_TEXT_CHARS = 20_000
"""Maximum number of characters of a message or a tool answer."""
REPLACEMENT_CHAR = "\ufffd"
_MAX_TOKENS_PER_CHAR = 6


def tree_to_json(
    tree: RolloutTree,
    split_tokens: Callable[[Sequence[int]], list[str]] | None = None,
    advantages: Mapping[str, float] | None = None,
    find_image: Callable[[str], Path | None] | None = None,
) -> dict[str, Any]:
    """Convert a tree to plain values.

    Args:
        tree: the tree.
        split_tokens: converts [N] token ids to [N] texts; None without a tokenizer.
        advantages: advantages by trajectory id.
        find_image: returns the file of an image by its id, None if there is none; without it images
            are read from where the run found them.

    Raises:
        ValueError: the parent of a fork is missing.
    """
    paths = list(tree.trajectories)
    parents, lanes = parent_indices(paths), assign_lanes(paths)
    thumbnails = TreeThumbnails(find_image)
    view = {
        **_prompt_json(tree.prompt, thumbnails),
        "forks": tree.num_forks,
        "extraRoots": tree.num_extra_roots,
        "size": max((len(trajectory.token_ids) for trajectory in paths), default=0),
        "paths": [
            {
                **_path_json(trajectory),
                "parent": parent,
                "lane": lane,
                "advantage": (advantages or {}).get(trajectory.trajectory_id),
                "turns": [
                    _turn_json(trajectory, turn, split_tokens)
                    | _turn_images_json(trajectory, turn, thumbnails)
                    for turn in turns_after_fork(trajectory)
                ],
            }
            for trajectory, parent, lane in zip(paths, parents, lanes, strict=True)
        ],
    }
    images = thumbnails.to_json()
    return view | ({"images": images} if images else {})


def parent_indices(paths: Sequence[Trajectory]) -> list[int | None]:
    """Return the index of each path's parent, None for a root.

    Raises:
        ValueError: a parent is missing or comes after its fork.
    """
    index: dict[str, int] = {}
    parents: list[int | None] = []
    for number, trajectory in enumerate(paths):
        if trajectory.parent_id is not None and trajectory.parent_id not in index:
            name = f"parent of trajectory {trajectory.trajectory_id}"
            raise InputError(name, trajectory.parent_id, "one that comes earlier in its tree")
        parents.append(None if trajectory.parent_id is None else index[trajectory.parent_id])
        index[trajectory.trajectory_id] = number
    return parents


def assign_lanes(paths: Sequence[Trajectory]) -> list[int]:
    """Return the lane of each path, a permutation of 0 ... P-1."""
    parents = parent_indices(paths)
    forks: list[list[int]] = [[] for _ in paths]
    for number, parent in enumerate(parents):
        if parent is not None:
            forks[parent].append(number)
    lanes = [0] * len(paths)
    stack = [number for number, parent in enumerate(parents) if parent is None][::-1]
    for lane in range(len(paths)):
        number = stack.pop()
        lanes[number] = lane
        # The last item is placed next: the latest fork, and the first of forks at one position.
        stack += sorted(forks[number], key=lambda fork: (paths[fork].fork_len, -fork))
    return lanes


def turns_after_fork(trajectory: Trajectory) -> list[Turn]:
    """Return the turns that end after the fork; those before it belong to the parent."""
    fork_len = trajectory.fork_len
    num_shared = sum(turn.stop <= fork_len for turn in trajectory.turns) if fork_len else 0
    return list(trajectory.turns[num_shared:])


def sampled_entropies(tree: RolloutTree) -> list[float]:
    """Return the entropies in nats of all sampled tokens, counting shared tokens once."""
    return [
        entropy
        for trajectory in tree.trajectories
        for entropy, mask in zip(
            trajectory.entropies[trajectory.fork_len :],
            trajectory.loss_mask[trajectory.fork_len :],
            strict=True,
        )
        if mask and math.isfinite(entropy)
    ]


class TokenTexts:
    """Splits decoded text into one piece per token, whose concatenation is the whole text.

    A token may be part of a character, and some decoders drop the space before the first token. The
    piece of a token is therefore the text that it adds after the previous token. Parts of a
    character are empty; the token that completes the character gets all of it.

    Args:
        decode: decodes token ids, keeping special tokens and spaces.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._cached_text_after = lru_cache(maxsize=200_000)(self._text_after)

    def split(self, token_ids: Sequence[int]) -> list[str]:
        """Return [N] texts of N token ids."""
        pieces: list[str] = []
        before: int | None = None
        partial: tuple[int, ...] = ()
        for token in token_ids:
            piece = self._cached_text_after(before, (*partial, token))
            if piece.endswith(REPLACEMENT_CHAR) and len(partial) < _MAX_TOKENS_PER_CHAR:
                pieces.append("")
                partial = (*partial, token)
                continue
            pieces.append(piece)
            before, partial = token, ()
        if partial:
            pieces[-1] = self._cached_text_after(before, partial)
        return pieces

    def _text_after(self, before: int | None, tokens: tuple[int, ...]) -> str:
        if before is None:
            return self._decode(tokens)
        start = self._decode((before,))
        text = self._decode((before, *tokens))
        # `before` alone has no text of its own if it completes a character of several tokens.
        return text.removeprefix(start) if text.startswith(start) else self._decode(tokens)


def _prompt_json(prompt: Prompt, thumbnails: TreeThumbnails) -> dict[str, Any]:
    images = iter(thumbnails.add(placed.image for placed in prompt.images))
    return {
        "id": prompt.prompt_id,
        "source": prompt.data_source,
        "question": [_message_json(message, images) for message in prompt.messages],
        "truth": ground_truth_text(prompt.ground_truth),
        "promptTokens": len(prompt.token_ids),
    }


def _message_json(message: Message, images: Iterator[int]) -> dict[str, Any]:
    """Return role and text of a message; takes the numbers of its images from `images`."""
    content = message.get("content")
    shown: dict[str, Any] = {"role": str(message.get("role", ""))}
    if not isinstance(content, list) or not all(_is_known_part(part) for part in content):
        return shown | {"text": _truncate_text(content)}
    found = list(islice(images, sum(part["type"] == "image" for part in content)))
    shown["text"] = _truncate_text(content_text(content))
    return shown | ({"images": found} if found else {})


def _is_known_part(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    return isinstance(part.get("text"), str) or isinstance(part.get("image"), ImageInput)


def _turn_images_json(
    trajectory: Trajectory, turn: Turn, thumbnails: TreeThumbnails
) -> dict[str, Any]:
    inside = [item.image for item in trajectory.images if turn.start <= item.start < turn.stop]
    return {"images": thumbnails.add(inside)} if inside else {}


def _path_json(trajectory: Trajectory) -> dict[str, Any]:
    score = trajectory.score
    path: dict[str, Any] = {
        "name": ".".join(map(str, trajectory.path)),
        "fork": trajectory.fork_len,
        "end": len(trajectory.token_ids),
        "stop": trajectory.stop_reason.value,
        "failed": trajectory.failed,
        "calls": trajectory.num_tool_calls,
        "sampled": sum(trajectory.loss_mask),
        "reward": None if score is None else score.value,
        "decisions": _decisions_json(trajectory),
    }
    if score is not None:
        path |= {"correct": score.correct, "f1": score.f1}
        path |= {"answer": _truncate_text(score.answer), "reason": _truncate_text(score.reason)}
        path |= {"parts": dict(score.parts)} if score.parts else {}
    if trajectory.baseline_entropy is not None:
        path["baseline"] = _round_to_4_digits(trajectory.baseline_entropy)
    if trajectory.tool_rewards:
        path["toolRewards"] = dict(trajectory.tool_rewards)
    if trajectory.template_drift:
        path["drift"] = _truncate_text(trajectory.template_drift)
    if trajectory.context_resets:
        path["restarts"] = [restart.start for restart in trajectory.context_resets]
    return path


def _decisions_json(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return the branch decisions with the names of the forks they made."""
    decisions, num_earlier = [], 0
    for decision in trajectory.decisions:
        forks = range(num_earlier, num_earlier + decision.num_forks)
        names = [".".join(map(str, (*trajectory.path, fork))) for fork in forks]
        num_earlier += decision.num_forks
        decisions.append(_decision_json(decision) | {"made": names})
    return decisions


def _decision_json(decision: BranchDecision) -> dict[str, Any]:
    probe = decision.probe_entropies
    return {
        "at": decision.position,
        "slots": decision.num_slots_left,
        "baseline": _round_to_4_digits(decision.baseline_entropy),
        "n": len(probe),
        "h": _round_to_4_digits(fmean(probe)) if probe else None,
        "dh": None if decision.delta_h is None else _round_to_4_digits(decision.delta_h),
        "p": None if decision.probability is None else _round_to_4_digits(decision.probability),
        "tau": None if decision.threshold is None else _round_to_4_digits(decision.threshold),
        "forks": decision.num_forks,
    }


def _turn_json(
    trajectory: Trajectory, turn: Turn, split_tokens: Callable[[Sequence[int]], list[str]] | None
) -> dict[str, Any]:
    # A turn that the path shares with its parent up to the fork begins at the fork.
    start = max(turn.start, trajectory.fork_len)
    turn_json: dict[str, Any] = {"by": turn.role.value, "from": start, "to": turn.stop}
    if turn.outcome is not None:
        turn_json["call"] = _call_json(turn.outcome, hidden=not turn.text.strip())
    if turn.role is not Role.assistant:
        return turn_json | {"text": _truncate_text(turn.text)}
    span = slice(start, turn.stop)
    turn_json |= {
        "h": _collapse_constant(
            [_round_to_4_digits(value) for value in trajectory.entropies[span]]
        ),
        "lp": _collapse_constant([_round_to_4_digits(value) for value in trajectory.logps[span]]),
        "v": _collapse_constant(trajectory.versions[span]),
        "sampled": _collapse_constant(trajectory.loss_mask[span]),
    }
    if split_tokens is None:
        return turn_json | {"text": turn.text, "ids": list(trajectory.token_ids[span])}
    return turn_json | {"pieces": split_tokens(trajectory.token_ids[span])}


def _call_json(outcome: ToolOutcome, *, hidden: bool) -> dict[str, Any]:
    call: dict[str, Any] = {
        "tool": outcome.tool,
        "status": outcome.status.value,
        "s": _round_to_4_digits(outcome.latency_s),
        "queue": _round_to_4_digits(outcome.queue_s),
    }
    if outcome.step_reward:
        call["reward"] = outcome.step_reward
    if outcome.is_invalid_call:
        call["bad"] = True
    # Show failures that are hidden from the policy.
    return call | ({"answer": _truncate_text(outcome.answer)} if hidden else {})


def _collapse_constant(values: Sequence[Any]) -> Any:
    """Return the values, or a single value if all are equal."""
    return values[0] if len(set(values)) == 1 else list(values)


def _round_to_4_digits(value: float) -> float:
    """Round to four digits; nan becomes the same object, so that constant turns collapse."""
    return math.nan if math.isnan(value) else float(f"{value:.4g}")


def _truncate_text(value: Any) -> str:
    """Truncate long text; message content of an unknown form is shown by its repr."""
    text = value if isinstance(value, str) else "" if value is None else str(value)
    if len(text) <= MAX_TEXT_CHARS:
        return text
    return f"{text[:MAX_TEXT_CHARS]} ... ({len(text) - MAX_TEXT_CHARS:,} more characters)"
