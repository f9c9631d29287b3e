"""Saving under one layout and resuming under another, with real ranks over gloo."""

from __future__ import annotations

import shutil
import signal

import pytest
import torch

from mega_agentrl.actor.checkpoint.checkpoint_dir import CheckpointManifest, latest_checkpoint
from mega_agentrl.config.enums import Dtype
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ModelConfig, ParallelConfig
from mega_agentrl.runtime.free_port import free_port
from tests.actor.checkpoint.checkpoint_jobs import call_all
from tests.actor.circles import mark_extended
from tests.parallel.pool import fork_server
from tests.tiny_models import make_tiny_model

# At 1, 2 and 4 tensor ranks the vocabulary of 67 is padded to 72, 80 and 96 rows.
DENSE = {"num_key_value_heads": 4, "vocab_size": 67}


def config_of(model, dtype=Dtype.float32, **layout):
    config = TrainConfig(model=ModelConfig(path=str(model), dtype=dtype))
    config.parallel = ParallelConfig(**layout)
    config.optim.micro_batch_tokens = 24
    return config


# Job: the model, the layout, and the saved job that it resumes, if it does not save itself.
EXPERTS = {"tensor": 2, "data": 2, "expert": 2, "sequence_parallel": True}
JOBS = {
    "dense TP2-PP2": ("dense", {"tensor": 2, "pipeline": 2}, None),
    "tied TP2-PP2": ("tied", {"tensor": 2, "pipeline": 2}, None),
    "moe TP2-DP2-EP2": ("moe", EXPERTS | {"distributed_optimizer": False}, None),
    "moe DP2-EP2": ("moe", {"data": 2, "expert": 2}, None),
    "dense DP2": ("dense", {"data": 2}, None),
    "bf16 DP2": ("bf16", {"data": 2}, None),
    "dense on TP4": ("dense", {"tensor": 4}, "dense TP2-PP2"),
    "dense on TP2": ("dense", {"tensor": 2}, "dense DP2"),
    "tied on PP2-virtual-DP2": (
        "tied",
        {"pipeline": 2, "virtual_pipeline": 2, "data": 2},
        "tied TP2-PP2",
    ),
    "moe on PP2": ("moe", {"pipeline": 2}, "moe TP2-DP2-EP2"),
    "dense TP2-PP2 on one": ("dense", {}, "dense TP2-PP2"),
    "tied TP2-PP2 on one": ("tied", {}, "tied TP2-PP2"),
    "moe DP2-EP2 on one": ("moe", {}, "moe DP2-EP2"),
    "dense DP2 on one": ("dense", {}, "dense DP2"),
    "bf16 DP2 on one": ("bf16", {}, "bf16 DP2"),
    "dense DP2 on one, plain": ("dense", {"distributed_optimizer": False}, "dense DP2"),
}


class Runs:
    """Jobs of the ranks, each run when a test first asks for its results by [rank][call]."""

    def __init__(self, root, batch, pool):
        self.root = root
        self.pool = pool
        self.batch = batch
        self._folders = {}
        self._results = {}

    def __getitem__(self, name):
        if name not in self._results:
            model, layout, saved = JOBS[name]
            if saved is None:
                calls = [
                    ("load", self.model(model)),
                    ("steps", self.batch, 2),
                    ("save", self._folder(name), {"epoch": 3, "ids": [1, 2]}),
                ]
            else:
                calls = [("resume", self.checkpoint(saved))]
            calls += [("random",), ("values",), ("steps", self.batch, 3)]
            self._results[name] = self.run(model, layout, calls)
        return self._results[name]

    def run(self, model, layout, calls):
        """Return the results of calls on each rank."""
        dtype = Dtype.bfloat16 if model == "bf16" else Dtype.float32
        config = config_of(self.model(model), dtype, **layout)
        return self.pool.run(call_all, config.parallel.world_size, config, calls)

    def checkpoint(self, name):
        """Return the folder that a job has saved."""
        _ = self[name]
        return self._folder(name)

    def model(self, name):
        """Return the folder of a model."""
        if name == "bf16":
            name = "dense"
        if name not in self._folders:
            folder = self.root / name
            self._folders[name] = (
                make_tiny_model("qwen3_moe", folder)
                if name == "moe"
                else make_tiny_model("qwen3", folder, tied=name == "tied", **DENSE)
            )
        return self._folders[name]

    def _folder(self, name):
        return self.root / "runs" / name.replace(" ", "-")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, batch, rank_pool):
    return Runs(tmp_path_factory.mktemp("checkpoints"), batch, rank_pool)


def merged(ranks):
    """Assemble the full tensors of a job by (kind, name) from all ranks; replicas must agree."""
    found = {}
    for rank in ranks:
        for kind, name, rect, value in rank[-2]:
            found.setdefault((kind, name), {}).setdefault(rect, value)
            assert torch.equal(found[kind, name][rect], value), (kind, name)
    tensors = {}
    for key, pieces in found.items():
        stop = [
            max(rect.stop[dim] for rect in pieces) for dim in range(len(next(iter(pieces)).stop))
        ]
        tensors[key] = torch.full(stop, torch.nan)
        for rect, value in pieces.items():
            tensors[key][rect.slices] = value.float()
        assert not tensors[key].isnan().any(), key
    return tensors


@pytest.mark.parametrize(
    "resumed",
    mark_extended(
        [name for name, (model, _, saved) in JOBS.items() if saved and model != "bf16"],
        quick=["moe DP2-EP2 on one", "tied TP2-PP2 on one"],
    ),
)
def test_a_run_continues_exactly_under_another_layout(resumed, runs):
    expected, got = runs[JOBS[resumed][2]], runs[resumed]
    before, after = (merged(ranks) for ranks in (expected, got))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    for rank in got:
        assert rank[0] == ({"epoch": 3, "ids": [1, 2]}, 2, 2)
        assert rank[-1] == pytest.approx(expected[0][-1], abs=1e-5)
    assert expected[0][-1][-1] != pytest.approx(expected[0][-1][0], abs=1e-3)


def test_moments_are_stored_and_not_only_zeros(runs):
    state = merged(runs["dense DP2"])
    assert {kind for kind, _ in state} == {"weight", "exp_avg", "exp_avg_sq"}
    assert all(value.abs().sum() > 0 for (kind, _), value in state.items() if kind != "weight")


def test_bf16_resumes_with_its_float32_masters(runs):
    expected, got = runs["bf16 DP2"], runs["bf16 DP2 on one"]
    before, after = merged(expected), merged(got)
    assert {kind for kind, _ in before} == {"weight", "master", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(after[key], value) for key, value in before.items())
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(before["master", name], before["weight", name])
    assert torch.equal(before["master", name].bfloat16().float(), before["weight", name])
    assert got[0][-1] == pytest.approx(expected[0][-1], abs=2e-2)


def test_the_random_state_is_restored_by_rank(runs):
    saved, resumed = (
        [random for *_, random, _, _ in runs[name]] for name in ("dense DP2", "dense on TP2")
    )
    assert not torch.equal(saved[0], saved[1])
    assert all(map(torch.equal, saved, resumed))


def test_a_checkpoint_of_another_model_is_refused(runs):
    calls = [("refused", "resume", runs.checkpoint("dense DP2"))]
    for (error,) in runs.run("tied", {"data": 2}, calls):
        assert error.got == {"tie_word_embeddings": False}


def test_a_checkpoint_has_the_state_at_its_start_although_training_went_on(runs):
    """The second save reuses the host memory of the first."""
    folder = runs.root / "runs/while-training"
    calls = [
        ("load", runs.model("dense")),
        ("steps", runs.batch, 2),
        ("values",),
        ("save_while_training", folder, runs.batch, 2),
        ("values",),
    ]
    ranks = runs.run("dense", {"data": 2}, calls)
    resume = [("resume", folder), ("values",), ("steps", runs.batch, 2)]
    resume += [("resume", f"{folder}-later"), ("values",)]
    ((_, values, losses, _, later),) = runs.run("dense", {}, resume)
    for number, loaded in ((2, values), (4, later)):
        saved = merged([[*rank[: number + 1], None] for rank in ranks])
        found = merged([[loaded, None]])
        assert all(torch.equal(found[key], value) for key, value in saved.items())
    assert losses == pytest.approx(ranks[0][3], abs=1e-5)


def test_a_damaged_or_missing_checkpoint_is_refused(runs):
    damaged = runs.root / "runs/damaged"
    shutil.copytree(runs.checkpoint("dense DP2"), damaged)
    data = damaged / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    calls = [("refused", "resume", damaged), ("refused", "resume", runs.root)]
    ((contents, no_checkpoint),) = runs.run("dense", {}, calls)
    assert contents.name == f"SHA-256 of {data}"
    assert no_checkpoint.name == str(runs.root / "manifest.json")


def test_the_manifest_lists_layout_and_files(runs):
    folder = runs.checkpoint("tied TP2-PP2")
    manifest = CheckpointManifest.read(folder)
    assert manifest.layout["tensor"] == manifest.layout["pipeline"] == 2
    assert (manifest.num_ranks, manifest.dtype) == (4, "float32")
    assert set(manifest.files) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert not list(folder.parent.glob("*.partial*"))


def test_a_kill_during_a_save_leaves_the_previous_checkpoint(runs, tmp_path):
    run = tmp_path / "run"
    config = config_of(runs.model("dense"), tensor=2)
    calls = [
        ("load", runs.model("dense")),
        ("steps", runs.batch, 2),
        ("save", run / "first"),
        ("steps", runs.batch, 3),
        ("die_in_save", run / "second", 1, tmp_path / "seen"),
    ]
    codes = run_to_death(config, calls)
    seen = (tmp_path / "seen").read_text()
    assert codes == [0, -signal.SIGKILL], seen
    assert "rank 0: RuntimeError: the save was abandoned" in seen
    assert str(run / "second") in seen
    assert latest_checkpoint(run) == run / "first"
    assert not (run / "second").exists()
    resume = [("resume", run / "first"), ("steps", runs.batch, 3)]
    ((_, losses),) = runs.run("dense", {}, resume)
    assert losses == pytest.approx(runs["dense DP2"][0][-1], abs=1e-5)


def run_to_death(config, calls):
    """Return the exit codes of ranks outside the pool, which would kill all if one dies."""
    rank_info = {
        "world_size": config.parallel.world_size,
        "master_address": "127.0.0.1",
        "master_port": free_port(),
        "timeout_s": 60.0,
    }
    ranks = [
        fork_server().Process(
            target=call_all_on_one_thread,
            args=(rank_info | {"rank": rank}, config, calls),
            daemon=True,
        )
        for rank in range(config.parallel.world_size)
    ]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(300.0)
        return [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def call_all_on_one_thread(rank_info, config, calls):
    torch.set_num_threads(1)
    call_all(rank_info, config, calls)
