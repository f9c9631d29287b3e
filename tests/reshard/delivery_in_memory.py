"""Executes a plan on dictionaries of numpy arrays, and counts bytes element by element."""

from __future__ import annotations

import numpy as np

from mega_agentrl.reshard.delivery import Places


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


def execute(plan, sources, sinks, tensors):
    """Parameters of every rollout rank after the plan; each hop reads what its source has."""
    layouts = [*sources, *sinks]
    ranks = [filled(layout, tensors) for layout in sources]
    ranks += [{s.name: np.full(s.shape, -1, dtype=np.int64) for s in layout} for layout in sinks]
    places = [Places(layout) for layout in layouts]
    for bucket in plan.buckets:
        for source, target in bucket.hops:
            for piece in bucket.pieces:
                origin = places[source].find(piece)[0]
                value = ranks[source][origin.param][origin.rect.slices]
                for place in places[target].find(piece):
                    there = ranks[target][place.param][place.rect.slices]
                    assert (there == -1).all(), f"{place} is written twice"
                    there[...] = value.reshape(there.shape)
    return ranks[len(sources) :]


def network_bound(sources, sinks, locations, hf_shapes, item_bytes):
    """Bytes that machines want and do not hold, by marking elements."""
    nodes = {location.node for location in locations}
    total = 0
    for node in nodes:
        held, wanted = ({n: np.zeros(s, dtype=bool) for n, s in hf_shapes.items()} for _ in "hw")
        for rank, layout in enumerate([*sources, *sinks]):
            if locations[rank].node == node:
                marks = held if rank < len(sources) else wanted
                for shard in layout:
                    for block in shard.blocks:
                        marks[block.hf_name][block.hf_rect.slices] = True
        total += sum(int((wanted[n] & ~held[n]).sum()) for n in hf_shapes) * item_bytes
    return total


def own_bytes(layout, item_bytes):
    """Bytes of a rank's shards, padding aside."""
    return item_bytes * sum(block.hf_rect.numel for shard in layout for block in shard.blocks)
