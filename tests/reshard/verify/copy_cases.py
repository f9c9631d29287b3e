"""Checks of `CopyTable` that every kernel must pass: on a CPU, in Triton's interpreter, on a GPU.

``python copy_cases.py`` runs them with the Triton kernel, in a process of its own, where
TRITON_INTERPRET=1 can be set before the kernel is imported.
"""

from __future__ import annotations

import random
import sys
from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import torch

from mega_agentrl.reshard.frames import FrameCodec, num_frame_bytes
from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.planner.planner import plan_transfer
from mega_agentrl.reshard.topology import RankLocation
from mega_agentrl.reshard.verify.copy_table import NO_TARGET, CopyTable, MatrixCopy
from mega_agentrl.reshard.verify.digest import compute_digests
from mega_agentrl.reshard.verify.digest_verifier import (
    DigestVerifier,
    ReceivedDigests,
    SourceDigests,
    collect_regions,
    regions_of_layout,
)
from tests.reshard.faults import cut
from tests.reshard.model_cuts import make_moe_shape, trainer_layouts_of
from tests.reshard.rollout_cuts import engine_layouts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_DIGESTS = 3


def random_bits(rows, columns, dtype, seed):
    """Any bits at all, NaN and infinity included."""
    generator = torch.Generator().manual_seed(seed)
    halves = torch.randint(-(2**15), 2**15, (rows, 2 * columns), generator=generator)
    return halves.to(torch.int16).view(dtype)[:, :columns].contiguous()


def bits_of(tensor):
    return tensor.cpu().view(torch.int16)


def random_tables(seed):
    """A table with blocks of matrices of all dtypes, to and from odd places; its tensors; items.

    The last tensors are the targets, which are zero.
    """
    rng = random.Random(seed)
    sources = [random_bits(24, rng.randint(40, 50), dtype, seed) for dtype in DTYPES]
    targets = [torch.zeros(24, rng.randint(100, 110), dtype=dtype) for dtype in DTYPES]
    copies, items = [], []
    for number in range(9):
        source, target = sources[number % 3], targets[number % 3]
        num_rows, num_columns = rng.choice([1, 2, 5, 8]), rng.choice([1, 2, 7, 16, 31])
        row, column = rng.randint(0, 16), rng.randint(0, 9)
        to_row, to_column = 8 * (number // 3), rng.randint(0, 60)
        first_row, first_column = rng.randint(0, 5000), rng.randint(0, 5000)
        copies.append(
            MatrixCopy(
                item_bytes=source.element_size(),
                source=number % 3,
                source_offset=row * source.shape[1] + column,
                source_stride=source.shape[1],
                target=3 + number % 3,
                target_offset=to_row * target.shape[1] + to_column,
                target_stride=target.shape[1],
                num_rows=num_rows,
                num_columns=num_columns,
                first_row=first_row,
                first_column=first_column,
                digest=rng.randrange(NUM_DIGESTS),
            )
        )
        places = [
            (slice(a, a + num_rows), slice(b, b + num_columns))
            for a, b in ((row, column), (to_row, to_column))
        ]
        rect = Rect((first_row, first_column), (first_row + num_rows, first_column + num_columns))
        items.append((*places, rect))
    return copies, [*sources, *targets], items


def check_random_tables(device):
    """Exactly the bits of the matrices change, and the digests are those of `compute_digests`."""
    for seed in range(12):
        copies, tensors, items = random_tables(seed)
        expected = [tensor.clone() for tensor in tensors]
        expected_sums = np.zeros((NUM_DIGESTS, 2), dtype=np.uint32)
        for copy, (source, target, rect) in zip(copies, items, strict=True):
            values = tensors[copy.source][source]
            expected[copy.target][target] = values
            expected_sums[copy.digest] += compute_digests([(values, rect)])[0]
        there = [tensor.to(device) for tensor in tensors]
        sum_D2 = torch.zeros(NUM_DIGESTS, 2, dtype=torch.int32, device=device)
        CopyTable(copies).run(there, sum_D2)
        assert (sum_D2.cpu().numpy().view(np.uint32) == expected_sums).all()
        for found, right in zip(there, expected, strict=True):
            assert torch.equal(bits_of(found), bits_of(right))


def check_transfer_of_experts(device):
    """A whole update of a real plan: all blocks get their digests from copies, and they agree."""
    shape = make_moe_shape(num_layers=1, num_experts=2, hidden_size=14, vocab_size=20)
    shapes = hf_shapes(shape)
    trainers, engine = trainer_layouts_of(shape, tensor=2), engine_layouts(shape, 2)
    names, nodes = list(shapes), [RankLocation(0)] * 4
    plan = plan_transfer(trainers, engine, nodes, "bfloat16", names=names, bucket_bytes=3000)
    tensors = {name: torch.randn(size) for name, size in shapes.items()}
    shards = [
        {name: value.to(device, torch.bfloat16) for name, value in cut(layout, tensors).items()}
        for layout in (*trainers, *engine)
    ]
    params = [{n: torch.zeros_like(v) for n, v in rank.items()} for rank in shards[2:]]
    regions = collect_regions(engine)
    sources = [SourceDigests(layout, regions, plan.dtype_of) for layout in trainers]
    received = [ReceivedDigests(layout, plan.dtype_of) for layout in engine]
    codecs = [FrameCodec(plan, layout) for layout in (*trainers, *engine)]
    copy_fns = [source.make_copy_fn() for source in sources]
    for bucket in plan.buckets:
        first = bucket.hops[0].source
        slot = torch.zeros(num_frame_bytes(bucket), dtype=torch.uint8, device=device)
        frame = codecs[first].write(bucket, slot, shards[first], 1, copy_fns[first])
        for hop in bucket.hops:
            batch = codecs[hop.target].batch(bucket)
            received[hop.target - 2].copy(batch, frame, params[hop.target - 2])
    with patch.object(ReceivedDigests, "_read_block", side_effect=AssertionError("not covered")):
        for one, rank_params, layout in zip(received, params, engine, strict=True):
            one.compute((shard, rank_params[shard.name]) for shard in layout)
    rank_digests = [
        source.compute(rank_shards.__getitem__)
        for source, rank_shards in zip(sources, shards, strict=False)
    ]
    verifier = DigestVerifier(trainers, regions)
    digests = verifier.expected_digests(rank_digests)
    from_memory = [
        SourceDigests(layout, regions, plan.dtype_of).compute(
            {name: value.cpu() for name, value in rank_shards.items()}.__getitem__
        )
        for layout, rank_shards in zip(trainers, shards, strict=False)
    ]
    assert (digests == verifier.expected_digests(from_memory)).all()
    for one, layout, found, right in zip(received, engine, params, shards[2:], strict=True):
        expected = digests[verifier.region_indices(regions_of_layout(layout))]
        assert one.find_mismatches(expected) == []
        assert all(torch.equal(found[name], right[name]) for name in right)
        spoiled = expected.copy()
        spoiled[3, 1] ^= 1
        assert one.find_mismatches(spoiled) == [regions_of_layout(layout)[3]]


def check_digests_without_copies(device):
    """Only kernels for GPUs can leave the target out."""
    copies, tensors, items = random_tables(0)
    sources = [tensor.to(device) for tensor in tensors[:3]]
    sum_D2 = torch.zeros(len(copies), 2, dtype=torch.int32, device=device)
    table = [copy._replace(target=NO_TARGET, digest=n) for n, copy in enumerate(copies)]
    CopyTable(table).run(sources, sum_D2)
    expected = compute_digests(
        (tensors[copy.source][place], rect)
        for copy, (place, _, rect) in zip(copies, items, strict=True)
    )
    assert (sum_D2.cpu().numpy().view(np.uint32) == expected).all()


CHECKS = (check_random_tables, check_transfer_of_experts)
GPU_CHECKS = (*CHECKS, check_digests_without_copies)


def let_sums_wrap(patches: ExitStack) -> None:
    """Let sums in Triton's interpreter wrap as on a GPU; before 3.9 they are an error."""
    from triton.runtime.interpreter import ReduceScanOpInterface, _get_np_dtype

    to_tensor = ReduceScanOpInterface.to_tensor

    def wrap(self, total, dtype):
        return to_tensor(self, np.asarray(total).astype(_get_np_dtype(dtype))[()], dtype)

    patches.enter_context(patch.object(ReduceScanOpInterface, "to_tensor", wrap))


def main() -> None:
    from mega_agentrl.reshard.verify import triton_copy

    with ExitStack() as patches:
        patches.enter_context(patch.object(CopyTable, "run", triton_copy.run_table))
        let_sums_wrap(patches)
        for check in GPU_CHECKS:
            check("cpu")
            sys.stdout.write(f"{check.__name__} passed\n")


if __name__ == "__main__":
    main()
