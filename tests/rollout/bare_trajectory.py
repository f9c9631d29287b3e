"""A trajectory without tokens, for tests that use scores only."""

from mega_agentrl.types.records import StopReason, Trajectory
from tests.fakes import make_prompt

PROMPT = make_prompt()


def bare_trajectory(path=(0,), **changes):
    """Ended by itself and not scored."""
    values = {
        "trajectory_id": "/".join(map(str, path)),
        "prompt": PROMPT,
        "path": path,
        "turns": [],
        "stop_reason": StopReason.eos,
    }
    values |= {name: [] for name in ("token_ids", "loss_mask", "logps", "entropies", "versions")}
    return Trajectory(**(values | {"turn_ids": []} | changes))
