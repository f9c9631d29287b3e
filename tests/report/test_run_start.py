"""What ran: records of starts are read back, and shown as text by name."""

from mega_agentrl.report.run_start import RunStart, append_start, read_starts

START = RunStart(
    time="2026-11-28T12:00:00+00:00",
    host="node-3",
    pid=4711,
    command="python -m mega_agentrl seed=2",
    working_folder="/home/me",
    overrides=("seed=2", "algo=grpo"),
    presets={"algo": "grpo"},
    versions={"torch": "2.13.0"},
)


def test_starts_are_read_back_in_order_without_lines_that_a_kill_cut_off(tmp_path):
    assert read_starts(tmp_path) == []
    append_start(tmp_path, START)
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write('{"time": "2026\n[1]\n{"time": "x", "later_field": 1}\n')
        file.write("[" * 100_000 + "\n\0\n")
    append_start(tmp_path, START)
    assert read_starts(tmp_path) == [START, START]


def test_facts_are_text_by_dotted_name():
    facts = START.facts()
    assert facts["pid"] == "4711" and facts["overrides"] == "seed=2 algo=grpo"
    assert facts["presets.algo"] == "grpo" and facts["versions.torch"] == "2.13.0"
