"""An OpenEnv server whose environment echoes two messages; prints its address. Needs openenv."""

import socket
import uuid

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


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


def main():
    """Serve until the process is killed."""
    app = create_fastapi_app(Echo, EchoAction, EchoObservation, max_concurrent_envs=8)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        server.run(sockets=[listening])


if __name__ == "__main__":
    main()
