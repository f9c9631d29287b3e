"""Formats the findings of a preflight as tables for people and as JSON for scripts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from mega_agentrl.estimate.device import GIB
from mega_agentrl.estimate.memory.model_state import num_active_parameters, num_parameters
from mega_agentrl.estimate.preflight.balance import MAX_IDLE

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import DeviceSpec
    from mega_agentrl.estimate.duration.passes import PassTime
    from mega_agentrl.estimate.duration.step import StepTime
    from mega_agentrl.estimate.duration.workload import Workload
    from mega_agentrl.estimate.memory.policy import PolicyMemory
    from mega_agentrl.estimate.preflight.balance import BalanceChange
    from mega_agentrl.estimate.preflight.report import PreflightProblem, PreflightReport
    from mega_agentrl.estimate.weight_transfer import TransferEstimate
    from mega_agentrl.reshard.mapping.model_shape import ModelShape
    from tools.preflight_parts.prompts import PromptFile
    from tools.preflight_parts.user_tools import ExampleCall

# Rows that start with "or" and those above are needed at different times; the peak counts the
# largest.
_POLICY_PARTS = {
    "weights": "weights",
    "gradients": "gradients, float32",
    "optimizer": "optimizer",
    "activations": "activations of the micro-batches",
    "vision_activations": "activations of the vision tower",
    "row_tensors": "the losses' tensors, one row per trajectory",
    "head_workspace": "logits chunk and the head's gradients",
    "layer_workspace": "or backward pass of a layer",
    "path_attention": "or keys and values along the trees' paths",
    "reference_staging": "or one chunk of the reference weights",
    "transfer_buckets": "or buckets of the weight transfer",
    "runtime": "CUDA, NCCL (assumed); on a CPU: libraries",
    "checkpoint_copy": "copy of a checkpoint that is being written",
    "sleeping_engine": "a sleeping engine on the same GPU",
    "offloaded_models": "other models on the same GPU, in host memory",
    "colocated_transfer_peak": "or the weights of both, while they are sent",
    "peak": "peak",
    "pinned_host": "pinned host memory: reference, offloaded state",
    "pinned_checkpoint": "pinned host memory: copy of a checkpoint",
}
_ENGINE_PARTS = {
    "weights": "weights",
    "activations": "activations of the largest pass",
    "logits": "logits and sampler",
    "runtime": "CUDA, NCCL (assumed); on a CPU: libraries, kernels",
    "kv_cache": "KV cache",
    "entropy_tap": "entropy tap",
    "transfer": "weight transfer: buckets and one module",
    "cuda_graphs": "CUDA graphs (assumed)",
    "colocated_policy": "offloaded models on the same GPU",
    "peak": "peak",
}
_MAX_COLUMNS = 4
_MAX_ANSWER = 300
"""Characters of a tool's answer that are shown."""


@dataclass(slots=True)
class PreflightFindings:
    """Everything that a preflight found; parts are None if they were not reached."""

    config: TrainConfig | None = None
    shape: ModelShape | None = None
    device: DeviceSpec | None = None
    report: PreflightReport | None = None
    transfer: TransferEstimate | None = None
    prompts: list[PromptFile] = field(default_factory=list)
    """The data files that were read."""
    workload: Workload | None = None
    """The trajectories that a step is expected to have."""
    step: StepTime | None = None
    balance: list[BalanceChange] = field(default_factory=list)
    """Changes that let policy and engines idle less."""
    tool_calls: list[ExampleCall] = field(default_factory=list)
    """Calls of the user's tools."""
    problems: list[PreflightProblem] = field(default_factory=list)
    """Reasons why the run cannot start."""
    notes: list[str] = field(default_factory=list)
    """Other remarks for the user."""


def as_json(findings: PreflightFindings) -> dict[str, Any]:
    """Return the findings as plain JSON values, with sizes in bytes."""
    plain: dict[str, Any] = {
        "runs": not findings.problems,
        "problems": [asdict(problem) for problem in findings.problems],
        "notes": findings.notes,
        "prompts": [asdict(file) for file in findings.prompts],
        "tool_calls": [asdict(call) for call in findings.tool_calls],
    }
    if findings.shape is not None:
        plain["model"] = {
            "architecture": findings.shape.architecture,
            "parameters": num_parameters(findings.shape),
            "active_parameters": num_active_parameters(findings.shape),
        }
    if findings.report is not None:
        engine = findings.report.engine
        plain["num_gpus"] = findings.report.num_gpus
        for name, stages in _trained_models(findings.report).items():
            plain[name] = [asdict(m) | {"peak": m.peak} for m in stages]
        sums = {"peak": engine.peak, "num_kv_cache_tokens": engine.num_kv_cache_tokens}
        plain["engine"] = asdict(engine) | sums
    if findings.transfer is not None:
        plain["transfer"] = asdict(findings.transfer)
    if findings.step is not None and findings.workload is not None:
        step = findings.step
        hours = {"gpu_hours_per_100_steps": step.gpu_hours_per_100_steps}
        plain["step"] = asdict(step) | hours
        plain["workload"] = asdict(findings.workload)
        plain["balance"] = list(map(str, findings.balance))
    return plain


def print_report(findings: PreflightFindings, console: Console) -> None:
    """Print tables, notes and the result."""
    if findings.shape is not None:
        total, active = num_parameters(findings.shape), num_active_parameters(findings.shape)
        used = f", {_format_count(active)} active per token" if active != total else ""
        console.print(f"{findings.shape.architecture}: {_format_count(total)} parameters{used}")
    if findings.report is not None and findings.config is not None and findings.device is not None:
        for name, stages in _trained_models(findings.report).items():
            console.print(_ranks_table(name, stages, findings.device, findings.config))
        console.print(_engine_table(findings.report, findings.device, findings.config))
    if findings.transfer is not None:
        console.print(_transfer_line(findings.transfer))
    if findings.step is not None and findings.workload is not None:
        console.print(_step_table(findings.step, findings.workload))
        console.print(_idle_line(findings.step), highlight=False)
        for number, change in enumerate(findings.balance):
            console.print(f"  {'change' if not number else '    or'}: {change}", markup=False)
    for file in findings.prompts:
        console.print(
            f"{file.key}: {file.num_prompts} prompts, the longest has {file.max_prompt_tokens} "
            "tokens"
        )
    for call in findings.tool_calls:
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        answer = call.answer if len(call.answer) <= _MAX_ANSWER else call.answer[:_MAX_ANSWER] + "…"
        console.print(f"tool {call.tool} {arguments}: {call.status}, {answer}", markup=False)
    for note in findings.notes:
        console.print(f"note: {note}", markup=False)
    for problem in findings.problems:
        console.print(f"[bold red]cannot run[/]: {problem.config_key}", highlight=False)
        console.print(f"  {problem.message}", markup=False)
        for number, change in enumerate(problem.suggestions):
            console.print(f"  {'solution' if not number else '      or'}: {change}", markup=False)
        if problem.is_searched and not problem.suggestions:
            console.print("  no solution with a few changed keys was found", markup=False)
    if not findings.problems:
        num = findings.report.num_gpus if findings.report else 0
        console.print(f"[bold green]can run[/] on {num} devices")


def _trained_models(report: PreflightReport) -> dict[str, list[PolicyMemory]]:
    """Return the memory of the models that are sharded by `parallel`, by name."""
    critic = {"critic": report.critic} if report.critic else {}
    return {"policy": report.policy, **critic}


def _ranks_table(
    name: str, stages: list[PolicyMemory], device: DeviceSpec, config: TrainConfig
) -> Table:
    layout = config.parallel
    sizes = ("tensor", "context", "data", "pipeline", "virtual_pipeline", "expert")
    parts = ", ".join(f"{size.replace('_', ' ')} {getattr(layout, size)}" for size in sizes)
    table = Table("", caption_justify="left")
    table.caption = f"{name}: {layout.world_size} ranks ({parts}){_format_memory_limit(device)}"
    stages = _shown_stages(stages)
    for memory in stages:
        table.add_column(f"stage {memory.stage}", justify="right")
    for part, label in _POLICY_PARTS.items():
        values = [getattr(memory, part) for memory in stages]
        if any(values):
            style = "bold" if part == "peak" else None
            table.add_row(label, *map(_format_bytes, values), style=style)
    return table


def _shown_stages(stages: list[PolicyMemory]) -> list[PolicyMemory]:
    """Return all stages, or if there are many the first, the fullest and the last."""
    if len(stages) <= _MAX_COLUMNS:
        return stages
    fullest = max(stages, key=lambda memory: memory.peak).stage
    return [stages[number] for number in sorted({0, fullest, len(stages) - 1})]


def _engine_table(report: PreflightReport, device: DeviceSpec, config: TrainConfig) -> Table:
    engine, memory = config.engine, report.engine
    table = Table("", caption_justify="left")
    table.add_column("per rank", justify="right")
    count = f"{config.cluster.num_engines} x {engine.tensor_parallel_size} ranks"
    table.caption = f"engines: {count}{_format_memory_limit(device)}"
    for name, label in _ENGINE_PARTS.items():
        value = getattr(memory, name)
        if value:
            style = "bold" if name == "peak" else None
            table.add_row(label, _format_bytes(value), style=style)
    table.add_row("tokens in the KV cache", f"{memory.num_kv_cache_tokens:,}")
    return table


def _step_table(step: StepTime, workload: Workload) -> Table:
    rollout, update = step.rollout, step.update
    table = Table("", caption_justify="left")
    table.add_column("seconds", justify="right")
    table.add_column("of them")
    table.caption = (
        f"a step (predicted): {workload.num_trajectories:.0f} trajectories, prompts of "
        f"{workload.prompt_tokens:.0f} tokens, responses of {workload.response_tokens:.0f}, at "
        f"most {workload.max_response_tokens:.0f} (--response-tokens), {workload.num_calls:.1f} "
        f"calls of {workload.call_s:g} s (--call-s)"
    )
    notes = {
        "rollout": f"tail {rollout.tail_s:.1f}, prefill {rollout.prefill_s:.1f}, waiting for tools "
        f"{rollout.wait_s:.1f}; {rollout.tokens_per_s:,.0f} tokens/s, at most {rollout.batch:.0f} "
        "requests in an engine",
        "log-probs": _parts_of_pass(step.log_probs),
        "update": f"MFU {step.mfu:.1%}; {_parts_of_pass(update)}",
        "checkpoint": "a step's share",
    }
    seconds = {
        "rollout": rollout.total_s,
        "log-probs": step.log_probs.total,
        "reference": step.reference.total if step.reference else 0.0,
        "critic": step.critic_s,
        "update": update.total,
        "driver": step.driver_s,
        "weight update": step.weight_update_s,
        "moving the models' state": step.offload_s,
        "checkpoint": step.checkpoint_s,
    }
    for name, value in seconds.items():
        if value:
            table.add_row(name, f"{value:.1f}", notes.get(name, ""))
    hours = step.gpu_hours_per_100_steps
    table.add_row("step", f"{step.total_s:.1f}", f"{hours:.0f} GPU hours for 100", style="bold")
    return table


def _parts_of_pass(time: PassTime) -> str:
    parts = {name.replace("_", "-"): value for name, value in asdict(time).items()}
    return ", ".join(f"{name} {value:.1f}" for name, value in parts.items() if value >= 0.05)


def _idle_line(step: StepTime) -> str:
    sides = {"policy": step.policy_idle, "engines": step.engine_idle}
    idle = ", ".join(f"{name} {share:.0%} of a step" for name, share in sides.items())
    too_much = step.idle > MAX_IDLE
    return f"idle: {idle}" + (f"; above {MAX_IDLE:.0%}" if too_much else "")


def _format_memory_limit(device: DeviceSpec) -> str:
    if device.memory_gib is None:
        return ""
    return f"; {device.usable_bytes / GIB:.1f} of {device.memory_gib:g} GiB usable"


def _format_bytes(num_bytes: float) -> str:
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit or name == "KiB":
            break
    return f"{num_bytes / unit:.2f} {name}"


def _format_count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


def _transfer_line(transfer: TransferEstimate) -> str:
    by_link = ", ".join(
        f"{_format_bytes(value)} {name.replace('_', ' ')}"
        for name, value in transfer.bytes_by_link.items()
    )
    adapters = ""
    if num_bytes := transfer.adapter_bytes_per_engine_rank:
        adapters = f" in the first update, then {_format_bytes(num_bytes)} of adapters"
    return (
        f"weight transfer: {_format_bytes(transfer.max_bytes_per_engine_rank)} to an engine rank"
        f"{adapters}; "
        f"in total {by_link}; predicted {transfer.predicted_s:.2f} s; lower bound "
        f"{transfer.lower_bound_s:.2f} s (an engine rank's own bytes over one network link)"
    )
