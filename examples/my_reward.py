"""A reward in one function, with a penalty for long answers; see docs/own_reward.md."""

import re
from typing import Any

FREE_CHARACTERS = 400


def compute_score(
    data_source: str, solution_str: str, ground_truth: str | list[str], extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Return 1 for a correct boxed answer, minus 0.1 per 400 characters beyond the first 400."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", solution_str)
    accepted = [ground_truth] if isinstance(ground_truth, str) else list(ground_truth)
    right = bool(boxed) and boxed[-1].strip() in accepted
    extra = max(0, len(solution_str) - FREE_CHARACTERS) / FREE_CHARACTERS
    return {"score": max(0.0, right - 0.1 * extra), "right": right, "length": len(solution_str)}
