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
from tests.parallel.pool import fork_server
from tests.tiny_models import make_tiny_model

# At 1, 2 and 4 tensor ranks the vocabulary of 67 is padded to 72, 80 and 96 rows.
DENSE = {"num_key_value_heads": 4, "vocab_size": 67}


def config_of(model, dtype=Dtype.float32, **layout):
    config = TrainConfig(model=ModelConfig(path=str(model), dtype=dtype))
    config.parallel = ParallelConfig(**layout)
    config.optim.micro_batch_tokens = 24
    return config


class Runs:
    """All jobs of the ranks; results by name, then [rank][call]."""

    def __init__(self, root, batch, pool):
        self.root = root
        self.pool = pool
        self.batch = batch
        dense = {
            tied: make_tiny_model("qwen3", root / f"dense-{tied}", tied=tied, **DENSE)
            for tied in (False, True)
        }
        moe = make_tiny_model("qwen3_moe", root / "moe")
        self.models = {"dense": dense[False], "tied": dense[True], "moe": moe, "bf16": dense[False]}
        self.results = {}
        self._save()
        self._resume()

    def _save(self):
        virtual = {"pipeline": 2, "virtual_pipeline": 2, "data": 2}
        experts = {"tensor": 2, "data": 2, "expert": 2, "sequence_parallel": True}
        self._run(
            {
                "dense TP2-PP2": self._saving("dense", tensor=2, pipeline=2),
                "tied TP2-PP2": self._saving("tied", tensor=2, pipeline=2),
                "dense on TP4": self._resuming("dense", "dense TP2-PP2", tensor=4),
                "tied on PP2-virtual-DP2": self._resuming("tied", "tied TP2-PP2", **virtual),
                "moe TP2-DP2-EP2": self._saving("moe", **experts, distributed_optimizer=False),
                "moe DP2-EP2": self._saving("moe", data=2, expert=2),
                "moe on PP2": self._resuming("moe", "moe TP2-DP2-EP2", pipeline=2),
                "dense DP2": self._saving("dense", data=2),
                "bf16 DP2": self._saving("bf16", data=2),
                "wrong model": (
                    config_of(self.models["tied"], data=2),
                    [("refused", "resume", self.folder("dense DP2"))],
                ),
                "twice": (
                    config_of(self.models["dense"], data=2),
                    [
                        ("load", self.models["dense"]),
                        ("refused", "save", self.folder("dense DP2")),
                        ("refused", "save", self.root / "unfit", {"x": {1, 2}}),
                    ],
                ),
            },
        )

    def _resume(self):
        damaged = self.root / "runs/damaged"
        shutil.copytree(self.folder("dense DP2"), damaged)
        data = damaged / "__1_0.distcp"
        data.write_bytes(data.read_bytes()[:-1] + b"?")
        saved = ("dense TP2-PP2", "tied TP2-PP2", "moe DP2-EP2", "dense DP2", "bf16 DP2")
        jobs = {f"{name} on one": self._resuming(name.split()[0], name) for name in saved}
        jobs["damaged"] = (
            config_of(self.models["dense"]),
            [("refused", "resume", damaged), ("refused", "resume", self.root)],
        )
        jobs["plain"] = self._resuming("dense", "dense DP2", distributed_optimizer=False)
        self._run(jobs)

    def folder(self, name):
        return self.root / "runs" / name.replace(" ", "-")

    def _saving(self, model, **layout):
        name = " ".join([model, _name(layout)])
        calls = [
            ("load", self.models[model]),
            ("steps", self.batch, 2),
            ("save", self.folder(name), {"epoch": 3, "ids": [1, 2]}),
            ("random",),
            ("values",),
            ("steps", self.batch, 3),
        ]
        dtype = Dtype.bfloat16 if model == "bf16" else Dtype.float32
        return config_of(self.models[model], dtype, **layout), calls

    def _resuming(self, model, saved, **layout):
        calls = [("resume", self.folder(saved)), ("random",), ("values",), ("steps", self.batch, 3)]
        dtype = Dtype.bfloat16 if model == "bf16" else Dtype.float32
        return config_of(self.models[model], dtype, **layout), calls

    def _run(self, jobs):
        for name, (config, calls) in jobs.items():
            num_ranks = config.parallel.world_size
            self.results[name] = self.pool.run(call_all, num_ranks, config, calls)


def _name(layout):
    short = {"tensor": "TP", "pipeline": "PP", "data": "DP", "expert": "EP"}
    return "-".join(f"{short[key]}{size}" for key, size in layout.items() if key in short)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, batch, rank_pool):
    return Runs(tmp_path_factory.mktemp("checkpoints"), batch, rank_pool)


def whole(ranks, call):
    """Assemble full tensors by (kind, name) from all ranks; replicas must agree."""
    found = {}
    for rank in ranks:
        for kind, name, rect, value in rank[call]:
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


RESUMED = {
    "dense on TP4": "dense TP2-PP2",
    "tied on PP2-virtual-DP2": "tied TP2-PP2",
    "moe on PP2": "moe TP2-DP2-EP2",
    "dense TP2-PP2 on one": "dense TP2-PP2",
    "tied TP2-PP2 on one": "tied TP2-PP2",
    "moe DP2-EP2 on one": "moe DP2-EP2",
    "dense DP2 on one": "dense DP2",
    "plain": "dense DP2",
}


@pytest.mark.parametrize("resumed", RESUMED)
def test_a_run_continues_exactly_under_another_layout(resumed, runs):
    expected, got = runs.results[RESUMED[resumed]], runs.results[resumed]
    before, after = whole(expected, 4), whole(got, 2)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    for rank in got:
        assert rank[0] == ({"epoch": 3, "ids": [1, 2]}, 2, 2)
        assert rank[3] == pytest.approx(expected[0][5], abs=1e-5)
    assert expected[0][5][-1] != pytest.approx(expected[0][5][0], abs=1e-3)


def test_moments_are_stored_and_not_only_zeros(runs):
    state = whole(runs.results["dense DP2"], 4)
    assert {kind for kind, _ in state} == {"weight", "exp_avg", "exp_avg_sq"}
    assert all(value.abs().sum() > 0 for (kind, _), value in state.items() if kind != "weight")


def test_bf16_resumes_with_its_float32_masters(runs):
    expected, (got,) = runs.results["bf16 DP2"], runs.results["bf16 DP2 on one"]
    before, after = whole(expected, 4), whole([got], 2)
    assert {kind for kind, _ in before} == {"weight", "master", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(after[key], value) for key, value in before.items())
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(before["master", name], before["weight", name])
    assert torch.equal(before["master", name].bfloat16().float(), before["weight", name])
    assert got[3] == pytest.approx(expected[0][5], abs=2e-2)


def test_the_random_state_is_restored_by_rank(runs):
    saved, resumed = runs.results["dense TP2-PP2"], runs.results["dense on TP4"]
    assert not torch.equal(saved[0][3], saved[1][3])
    for before, after in zip(saved, resumed, strict=True):
        assert torch.equal(before[3], after[1])


def test_loads_and_saves_that_are_not_possible_are_refused(runs):
    for rank in runs.results["wrong model"]:
        assert "tie_word_embeddings [False], expected [True]" in rank[0]
    first, second = runs.results["twice"]
    assert "there is a finished checkpoint" in first[1]
    assert "rank 0" in second[1]
    assert "extra: expected plain numbers" in first[2]
    contents, no_checkpoint = runs.results["damaged"][0]
    assert "__1_0.distcp has other contents" in contents
    assert "expected manifest.json" in no_checkpoint


def test_the_manifest_lists_layout_and_files(runs):
    folder = runs.folder("dense TP2-PP2")
    manifest = CheckpointManifest.read(folder)
    assert manifest.layout["tensor"] == manifest.layout["pipeline"] == 2
    assert (manifest.num_ranks, manifest.dtype) == (4, "float32")
    assert set(manifest.files) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert not list(folder.parent.glob("*.partial*"))


def test_a_kill_during_a_save_leaves_the_previous_checkpoint(runs, tmp_path):
    run = tmp_path / "run"
    config = config_of(runs.models["dense"], tensor=2)
    calls = [
        ("load", runs.models["dense"]),
        ("steps", runs.batch, 2),
        ("save", run / "first"),
        ("steps", runs.batch, 3),
        ("die_in_save", run / "second", 1, tmp_path / "seen"),
    ]
    codes = run_to_death(config, calls)
    seen = (tmp_path / "seen").read_text()
    assert codes == [0, -signal.SIGKILL], seen
    assert "rank 1 has sent no heartbeat" in seen
    assert str(run / "second") in seen
    assert latest_checkpoint(run) == run / "first"
    assert not (run / "second").exists()
    resume = [("resume", run / "first"), ("steps", runs.batch, 3)]
    ((_, losses),) = runs.pool.run(call_all, 1, config_of(runs.models["dense"]), resume)
    assert losses == pytest.approx(runs.results["dense DP2"][0][5], abs=1e-5)


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
