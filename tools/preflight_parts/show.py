"""A preflight's findings as tables for people and as JSON for scripts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from mega_agentrl.estimate.device import GIB
from mega_agentrl.estimate.rank_parameters import num_active_parameters, num_parameters

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import Device
    from mega_agentrl.estimate.policy_memory import PolicyMemory
    from mega_agentrl.estimate.transfer import Transfer
    from mega_agentrl.estimate.verdict import Problem, Verdict
    from mega_agentrl.reshard.model_shape import ModelShape
    from tools.preflight_parts.prompts import PromptFile

_POLICY_PARTS = {
    "weights": "weights",
    "gradients": "gradients, float32",
    "optimizer": "optimizer",
    "activations": "activations of the micro-batches",
    "logits": "logits chunk and the head's gradients",
    "layer": "or backward pass of a layer",
    "reference": "or reference, a piece",
    "transfer": "or buckets of the weight transfer",
    "runtime": "CUDA, NCCL (assumed); on a CPU libraries",
    "neighbour": "a sleeping engine on the same GPU",
    "both": "or the weights of both, while they are sent",
    "peak": "peak",
    "host": "host memory: reference, what makes room",
}
_ENGINE_PARTS = {
    "weights": "weights",
    "activations": "activations of the largest pass",
    "logits": "logits and sampler",
    "runtime": "CUDA, NCCL (assumed); on a CPU libraries, kernels",
    "cache": "KV cache",
    "tap": "entropy tap",
    "transfer": "buckets and a module of the weight transfer",
    "graphs": "CUDA graphs (assumed)",
    "neighbour": "the policy, off the same GPU",
    "peak": "peak",
}
_MAX_COLUMNS = 4


@dataclass(slots=True)
class Findings:
    """What was found out; parts are None where they were not looked at."""

    config: TrainConfig | None = None
    shape: ModelShape | None = None
    device: Device | None = None
    verdict: Verdict | None = None
    transfer: Transfer | None = None
    prompts: list[PromptFile] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def as_json(found: Findings) -> dict[str, Any]:
    """Plain values; bytes as they are."""
    plain: dict[str, Any] = {
        "runs": not found.problems,
        "problems": [asdict(problem) for problem in found.problems],
        "notes": found.notes,
        "prompts": [asdict(file) for file in found.prompts],
    }
    if found.shape is not None:
        plain["model"] = {
            "architecture": found.shape.architecture,
            "parameters": num_parameters(found.shape),
            "active_parameters": num_active_parameters(found.shape),
        }
    if found.verdict is not None:
        engine = found.verdict.engine
        plain["num_gpus"] = found.verdict.num_gpus
        for name, stages in _trained(found.verdict).items():
            plain[name] = [asdict(m) | {"peak": m.peak} for m in stages]
        sums = {"peak": engine.peak, "cache_tokens": engine.cache_tokens}
        plain["engine"] = asdict(engine) | sums
    if found.transfer is not None:
        plain["transfer"] = asdict(found.transfer)
    return plain


def show(found: Findings, console: Console) -> None:
    """Tables, notes and the verdict."""
    if found.shape is not None:
        total, active = num_parameters(found.shape), num_active_parameters(found.shape)
        used = f", {_count(active)} for a token" if active != total else ""
        console.print(f"{found.shape.architecture}: {_count(total)} parameters{used}")
    if found.verdict is not None and found.config is not None and found.device is not None:
        for name, stages in _trained(found.verdict).items():
            console.print(_ranks_table(name, stages, found.device, found.config))
        console.print(_engine_table(found.verdict, found.device, found.config))
    if found.transfer is not None:
        console.print(_transfer_line(found.transfer))
    for file in found.prompts:
        console.print(
            f"{file.key}: {file.num_prompts} prompts, the longest has {file.longest} tokens"
        )
    for note in found.notes:
        console.print(f"note: {note}", markup=False)
    for problem in found.problems:
        console.print(f"[bold red]cannot run[/]: {problem.key}", highlight=False)
        console.print(f"  {problem.message}", markup=False)
        for number, change in enumerate(problem.changes):
            console.print(f"  {'would do' if not number else '      or'}: {change}", markup=False)
        if not problem.changes:
            console.print("  no change of a few keys was found that would do", markup=False)
    if not found.problems:
        num = found.verdict.num_gpus if found.verdict else 0
        console.print(f"[bold green]can run[/] on {num} devices")


def _trained(verdict: Verdict) -> dict[str, list[PolicyMemory]]:
    """By name, the models that are cut into ranks by `parallel`."""
    critic = {"critic": verdict.critic} if verdict.critic else {}
    return {"policy": verdict.policy, **critic}


def _ranks_table(
    name: str, stages: list[PolicyMemory], device: Device, config: TrainConfig
) -> Table:
    layout = config.parallel
    sizes = ("tensor", "context", "data", "pipeline", "virtual", "expert")
    cut = ", ".join(f"{size} {getattr(layout, size)}" for size in sizes)
    table = Table("", caption_justify="left")
    table.caption = f"{name}: {layout.num_ranks} ranks ({cut}){_limit(device)}"
    stages = _chosen(stages)
    for memory in stages:
        table.add_column(f"stage {memory.stage}", justify="right")
    for part, label in _POLICY_PARTS.items():
        values = [getattr(memory, part) for memory in stages]
        if any(values):
            style = "bold" if part == "peak" else None
            table.add_row(label, *map(_size, values), style=style)
    return table


def _chosen(stages: list[PolicyMemory]) -> list[PolicyMemory]:
    """All stages, or of many the first, the fullest and the last."""
    if len(stages) <= _MAX_COLUMNS:
        return stages
    fullest = max(stages, key=lambda memory: memory.peak).stage
    return [stages[number] for number in sorted({0, fullest, len(stages) - 1})]


def _engine_table(verdict: Verdict, device: Device, config: TrainConfig) -> Table:
    engine, memory = config.engine, verdict.engine
    table = Table("", caption_justify="left")
    table.add_column("a rank", justify="right")
    count = f"{config.cluster.num_engines} x {engine.tensor} ranks"
    table.caption = f"engines: {count}{_limit(device)}"
    for name, label in _ENGINE_PARTS.items():
        value = getattr(memory, name)
        if value:
            style = "bold" if name == "peak" else None
            table.add_row(label, _size(value), style=style)
    table.add_row("tokens in the KV cache", f"{memory.cache_tokens:,}")
    return table


def _limit(device: Device) -> str:
    if device.gib is None:
        return ""
    return f"; {device.usable_bytes / GIB:.1f} of {device.gib:g} GiB usable"


def _size(num_bytes: float) -> str:
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit or name == "KiB":
            break
    return f"{num_bytes / unit:.2f} {name}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


def _transfer_line(transfer: Transfer) -> str:
    ways = ", ".join(
        f"{_size(value)} {name.replace('_', ' ')}" for name, value in transfer.total.items()
    )
    return (
        f"weight transfer: {_size(transfer.bytes_per_worker)} to an engine rank; in all {ways}; "
        f"predicted {transfer.seconds:.2f} s (an engine rank's own bytes over one network link: "
        f"{transfer.floor_s:.2f} s)"
    )
