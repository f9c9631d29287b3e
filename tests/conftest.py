"""The smoke run's input in small, shared by all tests that need a model and data."""

import dataclasses
import gc
import logging
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.vendor.pretty import for_type_by_name

from mega_agentrl.types.records import RolloutTree, Trajectory
from tests import cpu_time, selection

# How long an example takes says more about the machine than about the code. The quick profile tries
# the same examples on every machine; `--hypothesis-profile=thorough` looks for new ones.
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("quick")

# Collecting makes millions of objects that live as long as the process: no use looking for garbage.
gc.disable()

# Torch's threads wait for each other by spinning, which costs ten times the work on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# absl, which Megatron imports, has a log handler that closes its stream when vLLM sets up logging.
with suppress(ImportError):
    import absl.logging

    absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__

ROOT = Path(__file__).resolve().parents[1]


def print_tree(tree, printer, cycle):
    """Print the tree of a failing property as `tools/show_tree.py` does, without its tokens."""
    from mega_agentrl.rollout.io.render import render_tree

    with printer.indent(4):
        for line in render_tree(tree).split("\n"):
            printer.break_()
            printer.text(line)


def print_trajectory(trajectory, printer, cycle):
    """Print a trajectory of a failing property on one line."""
    printer.text(repr(trajectory))


for_type_by_name(RolloutTree.__module__, RolloutTree.__name__, print_tree)
for_type_by_name(Trajectory.__module__, Trajectory.__name__, print_trajectory)


def differing_fields(left, right, where=""):
    """Yield each place at which two records differ, with both values."""
    if dataclasses.is_dataclass(left) and type(left) is type(right):
        for spec in dataclasses.fields(left):
            values = getattr(left, spec.name), getattr(right, spec.name)
            yield from differing_fields(*values, f"{where}.{spec.name}")
    elif isinstance(left, (list, tuple)) and type(left) is type(right) and len(left) == len(right):
        for index, pair in enumerate(zip(left, right, strict=True)):
            yield from differing_fields(*pair, f"{where}[{index}]")
    elif left is not right and left != right:
        yield f"{where}: {left!r:.200} != {right!r:.200}"


def pytest_assertrepr_compare(op, left, right):
    """Name the first fields in which trees or trajectories differ; their reprs leave them out."""
    first = left[0] if isinstance(left, list) and left else left
    if op != "==" or not isinstance(first, (RolloutTree, Trajectory)):
        return None
    return [f"{type(first).__name__}: two that differ", *islice(differing_fields(left, right), 20)]


def pytest_addoption(parser):
    parser.addoption("--part", help="K/N: part K of N of the chosen tests, from 0")
    parser.addoption("--cpu-budget-s", type=float, help="fail if the tests use more CPU seconds")


def pytest_configure(config):
    """Measure CPU seconds: in the workers where there are some, else here; report them here."""
    plugins, worker = config.pluginmanager, getattr(config, "workerinput", None)
    if worker is not None or not config.getoption("numprocesses", None):
        plugins.register(cpu_time.CpuMeter())
    if worker is None:
        plugins.register(cpu_time.CpuReport(config.getoption("cpu_budget_s")))
    elif "lane" in worker:
        plugins.register(
            selection.Lane(worker["lane"], worker["workercount"], config.option.markexpr)
        )
    if part := config.getoption("part"):
        plugins.register(selection.Part(part))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """With `--dist each` each worker runs a lane of its own."""
    if node.config.getoption("dist") == "each":
        node.workerinput["lane"] = int(node.gateway.id.removeprefix("gw"))


def pytest_collection_finish(session):
    """Look for garbage again, but not among what collecting has left; see `parallel.pool`."""
    if not any("rank_pool" in getattr(item, "fixturenames", ()) for item in session.items):
        os.environ["TESTS_WITHOUT_RANK_POOL"] = "1"
    gc.freeze()
    gc.enable()


def pytest_make_parametrize_id(config, val, argname):
    """Name a test after its parameters only where they are short words or whole numbers.

    Anything else (bytes, floats, paths, error texts) is called by the name of the argument, with a
    number where that is not unique, so that ids are equal on all machines. None: pytest's choice.
    """
    is_word = isinstance(val, str) and re.fullmatch(r"[\w .,:=+-]{1,30}", val, re.ASCII)
    if val is None or is_word or isinstance(val, (bool, int, type)) or hasattr(val, "__name__"):
        return None
    return argname


def _end_run(signum, frame):
    raise KeyboardInterrupt(f"ended by {signal.Signals(signum).name}, a deadline passed?")


def pytest_runtest_setup(item):
    """Ending the run by SIGTERM still shows its failures; tests of GPUs skip without one.

    The handlers are set for each test, as Ray sets some of its own. A shell that starts the tests
    in the background has them ignore Ctrl-C, which tests of Ctrl-C must not inherit.
    """
    signal.signal(signal.SIGTERM, _end_run)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if item.get_closest_marker("gpu") is not None:
        import torch  # not for tests that do without

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU, 0 found")


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
    """A small tool-QA: model, data and corpus; made once for all lanes, which only read it."""
    from filelock import FileLock  # not where the tests for a GPU run alone

    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all lanes of this run
    folder, done = root / "toolqa", root / "toolqa.done"
    sizes = ("--num-train", "200", "--num-dev", "30", "--num-validation", "30")
    script = str(ROOT / "tools" / "make_tiny_model.py")
    command = [sys.executable, script, "--out", str(folder), "--num-demonstrations", "400", *sizes]
    with FileLock(root / "toolqa.lock"):
        if not done.exists():
            subprocess.run(command, check=True, timeout=180, capture_output=True)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def rank_pool(tmp_path_factory):
    """Rank processes for every test that needs some: started by the first, ended with the run."""
    from tests.parallel.pool import RankPool

    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ray_local():
    """A small Ray for all tests that need one."""
    import ray

    from mega_agentrl.runtime.cluster import set_ray_environment
    from mega_agentrl.runtime.ray_compat import patient_ray_start

    set_ray_environment()
    with patient_ray_start():
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=128 * 1024**2,
        )
    yield
    ray.shutdown()
