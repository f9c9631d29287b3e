"""The kernel kills an engine or a rank of a whole run for memory; the run says so and goes on."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from mega_agentrl.sandbox.cgroup import create_cgroup
from tests.e2e.conftest import finish, is_alive, start, title_of, wait_until
from tests.e2e.overrides import asset_overrides
from tools.chaos_parts.run import metrics, rl_steps

SETTINGS = (
    "experiment=smoke_ci",
    "sft.max_steps=0",  # the first update comes right after the start
    "save_every_steps=1",
    "data.prompts_per_step=4",
    "evaluate.num_questions=8",
    "report.trackers=[]",
)
STEPS = 3
WAIT_S = 400
ENGINE, RANK = "VLLM::EngineCore", "ray::PolicyActor"
PROCESSES = ("engine0", "policy-rank0", "policy-rank1", "driver", "ray", "sandboxes")


class Run:
    """A run in a child process, once the link of the weight transfer is open."""

    def __init__(self, assets, folder):
        self.folder = folder
        self.child = start(*SETTINGS, f"total_steps={STEPS}", *asset_overrides(assets, folder))

    def wait_until(self, condition):
        wait_until(lambda: condition() or self.child.poll() is not None, WAIT_S)
        assert self.child.poll() is None, finish(self.child, 1)[1][-3000:]

    def is_linked(self):
        return (self.folder / "logs" / "weights.txt").exists()

    def find(self, title):
        processes = psutil.Process(self.child.pid).children(recursive=True)
        return [process for process in processes if title_of(process).startswith(title)]

    def kill_for_memory(self, title):
        """Let the kernel kill a process with this title; return the name of its log file.

        It is moved to a control group that has no memory left beyond what the process already has.
        """
        self.wait_until(lambda: self.find(title))
        process = self.find(title)[-1]
        group = create_cgroup(memory_mib=0, num_processes=1 << 20)
        if not group.limits_memory:
            group.close()
            pytest.skip("no control group that limits memory can be made here")
        try:
            name = log_name(process)
            with suppress(OSError):  # it may be killed before it can be looked up in the group
                group.add(process.pid)
            self.wait_until(lambda: group.num_oom_kills)
            self.wait_until(lambda: not is_alive(process))
            assert group.num_oom_kills == 1
        finally:
            if is_alive(process):
                process.kill()
                process.wait(WAIT_S)
            group.close()
        return name

    def kill_twice(self, title):
        """Kill one process before the first update is acknowledged and another one after a step."""
        self.wait_until(self.is_linked)
        names = [self.kill_for_memory(title)]
        assert {line["stage"] for line in metrics(self.folder)} <= {"startup"}, "nothing sampled"
        self.wait_until(lambda: rl_steps(self.folder) >= 1)
        return [*names, self.kill_for_memory(title)]

    def end(self):
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)


def log_name(process):
    """Return the name of the log of a process or of the actor that it belongs to."""
    while True:
        output = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        if output.suffix == ".log":
            return output.stem
        process = process.parent()


@pytest.fixture
def run(assets, tmp_path):
    made = Run(assets, tmp_path / "run")
    yield made
    made.end()


@pytest.mark.slow(150)
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("title", [ENGINE, RANK], ids=["engine", "rank"])
def test_run_goes_on_when_the_kernel_kills_a_process_in_the_first_update_and_later(title, run):
    names = run.kill_twice(title)
    code, output = finish(run.child, 900)
    assert code == 0, output[-3000:]
    steps = [line["step"] for line in metrics(run.folder) if line["stage"] == "rl"]
    assert steps == list(range(1, STEPS + 1))
    terminal = " ".join(output.split())  # it breaks long lines
    assert terminal.count("killed by the kernel for lack of memory") == 2
    log = (run.folder / "logs" / "driver.log").read_text()
    lines = [line for line in log.splitlines() if "killed by the kernel" in line]
    assert [line.partition("such kills: ")[2].split()[0] for line in lines] == names
    for line in lines:
        assert "Lower " in line
        uses = line.partition("The run's processes ")[2]
        assert all(f"{name} " in uses for name in PROCESSES), uses
