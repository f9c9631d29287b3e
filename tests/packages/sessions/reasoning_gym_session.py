"""A task of Reasoning Gym; `--solve SEED` prints the turns that solve it."""

import json
import sys

import reasoning_gym as rg
from gateway import ask


def task_of(seed: int):
    """The data set and its first task."""
    dataset = rg.create_dataset("basic_arithmetic", size=1, seed=seed)
    return dataset, dataset[0]


if sys.argv[1:2] == ["--solve"]:
    print(json.dumps([task_of(int(sys.argv[2]))[1]["answer"]]))
else:
    dataset, entry = task_of(json.load(sys.stdin)["environment_kwargs"]["seed"])
    answer = ask([{"role": "user", "content": entry["question"]}])
    print(float(dataset.score_answer(answer=answer, entry=entry)))
