"""An engine is stuck when requests run and no token comes; an idle one never is."""

from mega_agentrl.generator.health import STUCK_TIMEOUT_S, TokenProgress, to_start_error
from mega_agentrl.types.errors import EngineLostError


def test_stuck_is_no_token_while_requests_run():
    now = [0.0]
    progress = TokenProgress(lambda: now[0])
    assert progress.stuck_s(0, 1) is None
    now[0] = STUCK_TIMEOUT_S
    assert progress.stuck_s(0, 1) is None
    now[0] = STUCK_TIMEOUT_S + 1
    assert progress.stuck_s(0, 1) == STUCK_TIMEOUT_S + 1
    assert progress.stuck_s(1, 1) is None, "a token came"
    now[0] += 2 * STUCK_TIMEOUT_S
    assert progress.stuck_s(1, 0) is None, "nothing runs"
    now[0] += STUCK_TIMEOUT_S
    assert progress.stuck_s(1, 1) is None, "it has just begun"


def test_a_start_that_a_signal_ended_is_a_lost_engine():
    message = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    for codes, is_lost in (
        ("{'EngineCore': -9}", True),
        ("{'EngineCore': 1}", False),
        ("{}", True),
    ):
        failure = to_start_error("engine 3", RuntimeError(message.format(codes)))
        assert isinstance(failure, EngineLostError) is is_lost, codes
        assert str(failure).startswith("engine 3 did not start")
        assert codes in str(failure)
