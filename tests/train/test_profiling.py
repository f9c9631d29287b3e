"""Chosen steps are traced around the log-prob pass and the update."""

from dataclasses import replace

from mega_agentrl.train.loop import train


def test_only_chosen_steps_are_traced(parts, config):
    parts.demonstrations = None
    train(parts, replace(config, report=replace(config.report, profile_steps=[2, 9])))
    assert parts.policy.verbs == [
        "send 1",
        "logprobs",
        "update",
        "send 2",
        "begin profile",
        "logprobs",
        "update",
        "end profile step-2-rank0.json",
        "send 3",
        "save step-000002",
        "export",
    ]
