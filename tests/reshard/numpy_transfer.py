"""Executes a plan on dictionaries of numpy arrays, and counts bytes element by element."""

from __future__ import annotations

import numpy as np

from mega_agentrl.reshard.planner.transfer_plan import ParamSliceIndex


def make_tensors(hf_shapes):
    """Every element of every tensor a number of its own."""
    tensors, count = {}, 1
    for name, shape in hf_shapes.items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(count, count + size, dtype=np.int64).reshape(shape)
        count += size
    return tensors


def filled(layout, tensors):
    """Parameters by name as the layout says, -1 where no block is."""
    params = {}
    for shard in layout:
        value = params[shard.name] = np.full(shard.shape, -1, dtype=np.int64)
        for block in shard.blocks:
            part = tensors[block.hf_name][block.hf_rect.slices]
            value[block.local_rect.slices] = part.reshape(block.local_rect.shape)
    return params


def execute(plan, trainer_layouts, rollout_layouts, tensors):
    """Parameters of every rollout rank after the plan; each hop reads what its source has."""
    layouts = [*trainer_layouts, *rollout_layouts]
    ranks = [filled(layout, tensors) for layout in trainer_layouts]
    ranks += [
        {s.name: np.full(s.shape, -1, dtype=np.int64) for s in layout} for layout in rollout_layouts
    ]
    param_slices = [ParamSliceIndex(layout) for layout in layouts]
    for bucket in plan.buckets:
        for source, target in bucket.hops:
            for tensor_slice in bucket.slices:
                origin = param_slices[source].find(tensor_slice)[0]
                value = ranks[source][origin.param][origin.rect.slices]
                for param_slice in param_slices[target].find(tensor_slice):
                    there = ranks[target][param_slice.param][param_slice.rect.slices]
                    assert (there == -1).all(), f"{param_slice} is written twice"
                    there[...] = value.reshape(there.shape)
    return ranks[len(trainer_layouts) :]


def network_bound(trainer_layouts, rollout_layouts, locations, hf_shapes, item_bytes):
    """Bytes that machines want and do not hold, by marking elements."""
    nodes = {location.node for location in locations}
    total = 0
    for node in nodes:
        held, wanted = ({n: np.zeros(s, dtype=bool) for n, s in hf_shapes.items()} for _ in "hw")
        for rank, layout in enumerate([*trainer_layouts, *rollout_layouts]):
            if locations[rank].node == node:
                marks = held if rank < len(trainer_layouts) else wanted
                for shard in layout:
                    for block in shard.blocks:
                        marks[block.hf_name][block.hf_rect.slices] = True
        total += sum(int((wanted[n] & ~held[n]).sum()) for n in hf_shapes) * item_bytes
    return total


def own_bytes(layout, item_bytes):
    """Bytes of a rank's shards, padding aside."""
    return item_bytes * sum(block.hf_rect.numel for shard in layout for block in shard.blocks)
