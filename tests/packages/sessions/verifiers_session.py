"""A game of verifiers with the adapter, beside the trainer's packages, which come first."""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.rollout.agents.environments.verifiers import VerifiersAgent
from mega_agentrl.types.records import StopReason
from tests.chat_models import Script, save_tokenizer
from tests.rollout.agents.agent_run import grow

ENVIRONMENT = {
    "taskset": {"id": "textarena", "game": "Hangman-v0"},
    "player": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 10},
}


WORD = "cat"


def write_words(folder: Path) -> None:
    """Let nltk find a corpus of one word instead of downloading it."""
    corpus = folder / "corpora" / "words"
    corpus.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (corpus / name).write_text(f"{WORD}\n", encoding="ascii")
    os.environ["NLTK_DATA"] = str(folder)


async def main():
    """Play the first task and print its reward."""
    with tempfile.TemporaryDirectory() as folder:
        write_words(Path(folder, "nltk"))
        codec = HFCodec(save_tokenizer("qwen3", Path(folder)))
        policy = Script(codec, [f"[{letter}]" for letter in WORD])
        agent = VerifiersAgent(environment=ENVIRONMENT)
        tree = await grow(codec, agent, policy=policy, group_size=1, row={"index": 0})
    (trajectory,) = tree.trajectories
    if trajectory.stop_reason is not StopReason.eos:
        sys.exit(f"{trajectory.stop_reason}: {trajectory.failure_reason}")
    print(trajectory.tool_rewards["agent.reward"])


if __name__ == "__main__":
    asyncio.run(main())
