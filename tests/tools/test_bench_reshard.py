from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from tests.reshard.model_cuts import make_shape
from tools.bench_reshard import main
from tools.reshard_bench.baselines import BASELINES, plan_buckets
from tools.reshard_bench.model import make_shards, trainer_layouts

ROOT = Path(__file__).parents[2]
KEYS = ["bench", "case", "unit", "ours", "baseline", "ratio"]
TINY = [
    *("--hidden-size", "256", "--intermediate-size", "512", "--num-hidden-layers", "4"),
    *("--num-attention-heads", "4", "--num-key-value-heads", "2", "--vocab-size", "2048"),
]


def bench(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tools" / "bench_reshard.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_a_tiny_model_by_every_path_end_to_end():
    # That all paths bring the same weights, and new ones, is checked by the tool itself.
    done = bench(*TINY, "--bucket-mib", "1", "--repeats", "1", "--cases", "*/gloo*")
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(list(line) == KEYS for line in lines)
    found = {line["case"]: line for line in lines}
    assert {line["unit"] for line in lines} == {"s", "MiB", "share"}
    for line in lines:
        assert line["bench"] == "reshard"
        assert line["ratio"] == pytest.approx(line["baseline"] / line["ours"], rel=0.05)
    # 4 layers of 787,200 elements, 2 tables of 2,048 x 256 and a norm, in float32: each of two
    # ranks gets its half by our path, norms and headers aside.
    whole = found["received/gloo/verl"]["baseline"]
    assert whole == pytest.approx((4 * 787_200 + 2 * 2048 * 256 + 256) * 4 / 2**20, rel=1e-4)
    assert found["received/gloo/verl"]["ours"] == pytest.approx(whole / 2, rel=0.01)


def test_a_pattern_that_fits_nothing_lists_the_cases(capsys):
    assert main(["--cases", "transfer/pigeon/verl"]) == 2
    said = capsys.readouterr()
    for name in ("transfer/gloo/verl", "update/shared_memory/slime", "memory/rollout/gloo/verl"):
        assert name in said.err
    assert said.out == ""


@pytest.mark.parametrize("peer", BASELINES)
def test_usual_path_sends_every_tensor_once_and_whole(peer):
    shape = make_shape(tie_word_embeddings=False)
    shapes = hf_shapes(shape)
    buckets = plan_buckets(peer, trainer_layouts(shape), shapes, bucket_bytes=20_000)
    sent = [tensor for bucket in buckets for tensor in bucket.tensors]
    assert sorted(tensor.name for tensor in sent) == sorted(shapes)
    assert all(tensor.shape == shapes[tensor.name] for tensor in sent)
    assert {bucket.root for bucket in buckets} == {"verl": {0}, "slime": {0, 2}}[peer]
    for bucket in buckets:
        assert bucket.num_bytes <= 20_000 or len(bucket.params) == 1
        ends = [t.offset + 4 * torch.Size(t.shape).numel() for t in bucket.tensors]
        assert [t.offset for t in bucket.tensors] == [0, *ends[:-1]]
        assert ends[-1] == bucket.num_bytes


def test_shards_of_all_trainer_ranks_are_cuts_of_the_same_tensors():
    shape = make_shape(tie_word_embeddings=False)
    layouts = trainer_layouts(shape)
    whole = {name: torch.full(sides, torch.nan) for name, sides in hf_shapes(shape).items()}
    for layout in layouts:
        shards = make_shards(shape, layout)
        for shard in layout:
            for block in shard.blocks:
                there = whole[block.hf_name][block.hf_rect.slices]
                here = shards[shard.name][block.local_rect.slices].reshape(there.shape)
                assert torch.equal(here[~there.isnan()], there[~there.isnan()])  # replicas
                there.copy_(here)
    assert not any(values.isnan().any() for values in whole.values())
    values = torch.cat([tensor.flatten() for tensor in whole.values() if tensor.ndim > 1])
    assert len(values.unique()) > 0.99 * len(values)
