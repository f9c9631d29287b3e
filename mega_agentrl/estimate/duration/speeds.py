"""Speeds of devices: those of data sheets, and the share of them that kernels reach.

Measured on one H100 or H200 (BENCHMARKS.md, "On one GPU") are the shares of matrix products
(training steps reach 0.6 of the peak, a plain product up to 0.79) and of the attention (0.26 to
0.58 by kernel). Calculated from data sheets: peak, memory and links. Assumed, until several GPUs
have been measured: `grouped`, `decode`, the latencies, and what hosts and disks do. Those of an
A100 are assumed but for its data sheet.

A CPU has no entry: `tools/bench_step_time.py` measures the one that it runs on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.topology import LinkSpeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeeds:
    """Speeds of one device, of its links and of its share of the host."""

    peak_flops: float
    """Dense bfloat16 FLOP/s (`estimate.flops`)."""
    memory: float
    """Bytes/s of the device's memory."""
    links: LinkSpeeds = field(default_factory=LinkSpeeds)
    """Bytes/s between two ranks."""
    matmul: float = 0.62
    """Share of `peak_flops` that the products of linear layers and of the vocabulary reach."""
    grouped: float = 0.55
    """The same for the grouped products of experts."""
    attention: float = 0.35
    """The same for attention scores, of which only those on and below the diagonal count."""
    elementwise: float = 0.8
    """Share of `memory` that norms, activations, permutations and the optimizer reach."""
    decode: float = 0.7
    """Share of `memory` at which an engine reads weights and KV cache."""
    collectives: float = 0.8
    """Share of a link that collectives reach."""
    launch_s: float = 6e-6
    """Seconds of the host for each kernel of training."""
    launches_overlap: bool = True
    """Whether the device computes while the host launches; False for a CPU."""
    collective_s: float = 2e-5
    """Seconds that a collective takes at least; half of it inside an engine."""
    engine_step_s: float = 3e-3
    """Seconds of an engine's step besides its kernels: scheduling, sampling, entropies."""
    engine_request_s: float = 1e-5
    """Seconds of a step for each request in it."""
    request_s: float = 0.02
    """Seconds between the request of a turn and its first step."""
    update_overhead_s: float = 0.2
    """Seconds of a weight update besides the links: pause, set-up of the plan, digests."""
    host_link: float = 25e9
    """Bytes/s between a device and host memory when all of a node copy."""
    disk: float = 3e9
    """Bytes/s that a node writes to the folder of checkpoints."""
    driver_token_s: float = 3e-7
    """Seconds of the driver for each token of a step: packing, advantages, metrics."""


_HOPPER_LINKS = LinkSpeeds()
SPEEDS = {
    "H100": DeviceSpeeds(peak_flops=989e12, memory=3.35e12, links=_HOPPER_LINKS),
    "H200": DeviceSpeeds(peak_flops=989e12, memory=4.8e12, links=_HOPPER_LINKS),
    "A100": DeviceSpeeds(
        peak_flops=312e12,
        memory=2.04e12,
        links=LinkSpeeds(same_gpu=0.9e12, same_node=270e9, network=25e9),
        matmul=0.7,
        grouped=0.6,
        attention=0.45,
    ),
}
"""Speeds by name, of the SXM modules: eight in a node, a network port each (400 Gb/s, A100 200)."""


def device_speeds(name: str) -> DeviceSpeeds:
    """Return the speeds of a GPU; `InputError` if it is not in the table."""
    if name not in SPEEDS:
        raise InputError("device", name, f"one of {', '.join(SPEEDS)}")
    return SPEEDS[name]
