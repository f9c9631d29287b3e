"""An engine is stuck when requests run and no token comes; an idle one never is."""

from mega_agentrl.generator.liveness import STUCK_S, Progress


def test_stuck_is_no_token_while_requests_run():
    now = [0.0]
    progress = Progress(lambda: now[0])
    assert progress.stuck_s(0, 1) is None
    now[0] = STUCK_S
    assert progress.stuck_s(0, 1) is None
    now[0] = STUCK_S + 1
    assert progress.stuck_s(0, 1) == STUCK_S + 1
    assert progress.stuck_s(1, 1) is None, "a token came"
    now[0] += 2 * STUCK_S
    assert progress.stuck_s(1, 0) is None, "nothing runs"
    now[0] += STUCK_S
    assert progress.stuck_s(1, 1) is None, "it has just begun"
