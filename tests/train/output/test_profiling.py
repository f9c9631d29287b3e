"""Chosen steps are traced around the log-prob pass and the update."""

from dataclasses import replace

from mega_agentrl.train.trainer import train


def test_only_chosen_steps_are_traced(components, config):
    components.open_sft_stream = None
    train(components, replace(config, report=replace(config.report, profile_steps=[2, 9])))
    assert components.policy.calls == [
        "sync 1",
        "compute_log_probs",
        "update",
        "sync 2",
        "start profile",
        "compute_log_probs",
        "update",
        "stop profile step-2-rank0.json",
        "sync 3",
        "save step-000002",
        "export_hf",
    ]
