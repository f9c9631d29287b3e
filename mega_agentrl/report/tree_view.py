"""A rollout tree as the page's viewer reads it: what each path wrote itself, with its numbers.

A shared prefix is there once, with the path that wrote it. Keys are short, as there are many::

    {"id", "source", "question": [{"role", "text"}], "truth", "size", "paths": [
      {"name": "0.1", "parent": 0, "lane": 1, "fork": 10, "end": 30, "stop": "eos",
       "reward", "correct", "advantage", ..., "decisions": [{"at", "dh", "p", "tau", ...}],
       "turns": [{"by": "assistant", "from": 10, "to": 14, "text": "...",
                  "pieces": ["a", ...], "h": [...], "lp": [...], "v": 3, "sampled": 1},
                 {"by": "tool", ..., "call": {"tool", "status", "s", ...}}]}]}

`h`, `lp`, `v`, `sampled` hold one value per token; where all are the same, that one. Entropies
and log-probs keep four digits. Nothing is escaped here: that is `markup.script_json`'s.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mega_agentrl.report.lanes import lanes_of, parents_of
from mega_agentrl.types.records import Author

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mega_agentrl.types.records import (
        Decision,
        Prompt,
        RolloutTree,
        ToolOutcome,
        Trajectory,
        Turn,
    )

MOST_TEXT = 20_000
"""Characters of one message or tool answer that are shown."""


def tree_view(
    tree: RolloutTree,
    cut: Callable[[Sequence[int]], list[str]] | None = None,
    advantages: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The tree as plain values.

    cut: [N] token ids to [N] texts, None where there is no tokenizer. advantages: by trajectory
    id. Raises `ValueError` for a fork whose parent is missing.
    """
    paths = list(tree.trajectories)
    parents, lanes = parents_of(paths), lanes_of(paths)
    return {
        **_question(tree.prompt),
        "forks": tree.num_forks,
        "topUps": tree.num_top_ups,
        "size": max((len(one.token_ids) for one in paths), default=0),
        "paths": [
            {
                **_path(one),
                "parent": parent,
                "lane": lane,
                "advantage": (advantages or {}).get(one.trajectory_id),
                "turns": [_turn(one, turn, cut) for turn in own_turns(one)],
            }
            for one, parent, lane in zip(paths, parents, lanes, strict=True)
        ],
    }


def own_turns(one: Trajectory) -> list[Turn]:
    """The turns a path wrote itself; those before `fork_len` are its parent's."""
    shared = sum(turn.stop <= one.fork_len for turn in one.turns) if one.fork_len else 0
    return list(one.turns[shared:])


def sampled_entropies(tree: RolloutTree) -> list[float]:
    """Entropies of all sampled tokens, a shared one once; nats."""
    return [
        entropy
        for one in tree.trajectories
        for entropy, mask in zip(
            one.entropies[one.fork_len :], one.loss_mask[one.fork_len :], strict=True
        )
        if mask and math.isfinite(entropy)
    ]


def _question(prompt: Prompt) -> dict[str, Any]:
    truth = prompt.ground_truth
    return {
        "id": prompt.prompt_id,
        "source": prompt.data_source,
        "question": [
            {"role": str(message.get("role", "")), "text": _text(message.get("content"))}
            for message in prompt.messages
        ],
        "truth": truth if isinstance(truth, str) else " | ".join(truth),
        "promptTokens": len(prompt.token_ids),
    }


def _path(one: Trajectory) -> dict[str, Any]:
    score = one.score
    found: dict[str, Any] = {
        "name": ".".join(map(str, one.path)),
        "fork": one.fork_len,
        "end": len(one.token_ids),
        "stop": one.stop_reason.value,
        "failed": one.failed,
        "calls": one.num_calls,
        "sampled": sum(one.loss_mask),
        "reward": None if score is None else score.value,
        "decisions": _decisions(one),
    }
    if score is not None:
        found |= {"correct": score.correct, "f1": score.f1}
        found |= {"answer": _text(score.answer), "reason": _text(score.reason)}
        found |= {"parts": dict(score.parts)} if score.parts else {}
    if one.baseline_entropy is not None:
        found["baseline"] = _short(one.baseline_entropy)
    if one.tool_rewards:
        found["toolRewards"] = dict(one.tool_rewards)
    if one.template_drift:
        found["drift"] = _text(one.template_drift)
    if one.restarts:
        found["restarts"] = [restart.start for restart in one.restarts]
    return found


def _decisions(one: Trajectory) -> list[dict[str, Any]]:
    """What was asked and answered, each with the names of the forks it made."""
    found, made = [], 0
    for decision in one.decisions:
        names = [
            ".".join(map(str, (*one.path, made + number))) for number in range(decision.num_forks)
        ]
        made += decision.num_forks
        found.append(_decision(decision) | {"made": names})
    return found


def _decision(decision: Decision) -> dict[str, Any]:
    probe = decision.probe_entropies
    return {
        "at": decision.at,
        "slots": decision.slots,
        "baseline": _short(decision.baseline),
        "n": len(probe),
        "h": _short(fmean(probe)) if probe else None,
        "dh": None if decision.delta_h is None else _short(decision.delta_h),
        "p": None if decision.probability is None else _short(decision.probability),
        "tau": None if decision.threshold is None else _short(decision.threshold),
        "forks": decision.num_forks,
    }


def _turn(
    one: Trajectory, turn: Turn, cut: Callable[[Sequence[int]], list[str]] | None
) -> dict[str, Any]:
    found: dict[str, Any] = {"by": turn.author.value, "from": turn.start, "to": turn.stop}
    if turn.outcome is not None:
        found["call"] = _call(turn.outcome, hidden=not turn.text.strip())
    if turn.author is not Author.assistant:
        return found | {"text": _text(turn.text)}
    own = slice(turn.start, turn.stop)
    found |= {
        "h": _packed([_short(value) for value in one.entropies[own]]),
        "lp": _packed([_short(value) for value in one.logps[own]]),
        "v": _packed(one.versions[own]),
        "sampled": _packed(one.loss_mask[own]),
    }
    if cut is None:
        return found | {"text": turn.text, "ids": list(one.token_ids[own])}
    return found | {"pieces": cut(one.token_ids[own])}


def _call(outcome: ToolOutcome, *, hidden: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tool": outcome.tool,
        "status": outcome.status.value,
        "s": _short(outcome.latency_s),
        "queue": _short(outcome.queue_s),
    }
    if outcome.step_reward:
        found["reward"] = outcome.step_reward
    if outcome.bad_call:
        found["bad"] = True
    # A failure that the policy was not told of is for people all the same.
    return found | ({"answer": _text(outcome.answer)} if hidden else {})


def _packed(values: Sequence[Any]) -> Any:
    """The values, or the one that all of them are."""
    return values[0] if len(set(values)) == 1 else list(values)


def _short(value: float) -> float:
    """Four digits; every nan is the same one, so that a turn of nothing else is packed."""
    return math.nan if math.isnan(value) else float(f"{value:.4g}")


def _text(value: Any) -> str:
    """Text that is not too long for a page; parts of a message that are no text by their repr."""
    text = value if isinstance(value, str) else "" if value is None else str(value)
    if len(text) <= MOST_TEXT:
        return text
    return f"{text[:MOST_TEXT]} ... ({len(text) - MOST_TEXT:,} more characters)"
