"""An OpenEnv server whose environment echoes two messages; needs openenv."""

import threading
import time
import uuid
from contextlib import contextmanager

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

START_TIMEOUT_S = 20


class EchoAction(Action):
    message: str


class EchoObservation(Observation):
    echo: str


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id=str(uuid.uuid4()), step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = State(episode_id=str(uuid.uuid4()), step_count=0)
        return EchoObservation(echo="ready")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        return EchoObservation(
            echo=f"echo {action.message}",
            reward=0.1 * len(action.message),
            done=self._state.step_count == 2,
        )

    @property
    def state(self):
        return self._state


@contextmanager
def serve_echo():
    """The address of a server in a thread."""
    app = create_fastapi_app(Echo, EchoAction, EchoObservation, max_concurrent_envs=8)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)
