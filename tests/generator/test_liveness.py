"""An engine is stuck when requests run and no token comes; an idle one never is."""

from mega_agentrl.generator.liveness import STUCK_S, Progress, start_failure
from mega_agentrl.types.faults import EngineLostError


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


def test_a_start_that_a_signal_ended_is_a_lost_engine():
    said = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    for codes, is_lost in (
        ("{'EngineCore': -9}", True),
        ("{'EngineCore': 1}", False),
        ("{}", True),
    ):
        failure = start_failure("engine 3", RuntimeError(said.format(codes)))
        assert isinstance(failure, EngineLostError) is is_lost, codes
        assert str(failure).startswith("engine 3 did not start")
        assert codes in str(failure)
