r"""Checks whether a configuration can run, without a GPU, for example on a login node.

    python tools/preflight.py experiment=qwen3_32b_64gpu model.path=... data.train=... [key=value]
    python tools/preflight.py experiment=qwen3_32b_64gpu --no-files \
        --model-config tools/model_configs/qwen3-32b.json

Checks the configuration as the run does, compares the estimated memory of policy and engine ranks
with that of the GPU (`--gpu-gib`), estimates the duration of a weight transfer over the links
(`--*-gbs`) and of each phase of a step on `--hardware`, and the share of it in which policy or
engines idle, reads the prompts if data and tokenizer are present, loads your own tools, rewards and
simulated users, makes the example calls of the tools, and runs the set-up and the reward command of
each row once in a workspace (the set-up must succeed, the reward must be 0). Models: Llama, Qwen2,
Qwen3, Qwen3Moe, Qwen2.5-VL, Qwen3-VL; a folder with config.json is enough. Exit code 1: the run
cannot start; the output names the key to change and working values. torch is never imported, except
by your own code.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mega_agentrl.config.errors import ConfigError  # noqa: E402
from mega_agentrl.config.override_keys import repeated_keys  # noqa: E402
from mega_agentrl.estimate.device import DeviceSpec  # noqa: E402
from mega_agentrl.estimate.duration.speeds import SPEEDS, DeviceSpeeds, device_speeds  # noqa: E402
from mega_agentrl.estimate.duration.step import predict_step  # noqa: E402
from mega_agentrl.estimate.duration.workload import (  # noqa: E402
    CALL_S,
    MEAN_FRACTION,
    expected_workload,
)
from mega_agentrl.estimate.preflight.balance import suggest_balance  # noqa: E402
from mega_agentrl.estimate.preflight.report import (  # noqa: E402
    PreflightProblem,
    run_preflight,
    tree_note,
)
from mega_agentrl.estimate.preflight.suggestions import ConfigCheck  # noqa: E402
from mega_agentrl.estimate.weight_transfer import estimate_transfer  # noqa: E402
from mega_agentrl.reshard.mapping.model_shape import ModelShape  # noqa: E402
from mega_agentrl.reshard.topology import LinkType  # noqa: E402
from tools.preflight_parts.compose import compose_config, make_config_check, make_config_only_folder  # noqa: E402
from tools.preflight_parts.report import PreflightFindings, as_json, print_report  # noqa: E402


def collect_findings(args: argparse.Namespace, folder: Path) -> PreflightFindings:
    """Run all checks; `folder` is for temporary files."""
    findings = PreflightFindings()
    try:
        device = DeviceSpec(
            memory_gib=None if args.cpu else args.gpu_gib,
            gpus_per_node=args.per_node,
            reserved_fraction=args.reserve,
        )
        path = make_config_only_folder(args.model_config, folder) if args.model_config else None
        config = compose_config(args.overrides, model_path=path)
        findings.notes += repeated_keys(args.overrides)
        findings.config, findings.device = config, device
        check = make_config_check(folder, files=not args.no_files)
        check(config)
        findings.shape = shape = ModelShape.from_folder(config.model.path)
        findings.report = run_preflight(
            config, shape, device, check, num_gpus=args.gpus, imbalance=args.imbalance
        )
        findings.problems += findings.report.problems
        findings.notes += findings.report.notes
        if not findings.problems:
            speeds = device_speeds(args.hardware)
            gbs = {str(link): getattr(args, f"{link}_gbs") for link in LinkType}
            links = {link: value * 1e9 for link, value in gbs.items() if value is not None}
            speeds = replace(speeds, links=replace(speeds.links, **links))
            findings.transfer = estimate_transfer(config, shape, device, speeds.links)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        findings.problems.append(_config_error_problem(error))
    else:
        _add_prompts(findings, args)
        if not args.no_files:
            _add_tool_calls(findings)
        if not (args.no_files or args.no_workspaces):
            _add_workspaces(findings)
        if findings.transfer is not None and device.is_gpu and not config.is_eval_only:
            _add_step_time(findings, args, speeds, check)
    return findings


def _add_step_time(
    findings: PreflightFindings, args: argparse.Namespace, speeds: DeviceSpeeds, check: ConfigCheck
) -> None:
    config, shape, device = findings.config, findings.shape, findings.device
    assert config and shape and device and findings.transfer, "all else has been estimated"
    prompts = [file for file in findings.prompts if file.key == "data.train"]
    findings.workload = workload = expected_workload(
        config,
        prompt_tokens=prompts[0].mean_prompt_tokens if prompts else None,
        response_tokens=args.response_tokens,
        call_s=args.call_s,
    )
    run = (config, shape, device, speeds, workload)
    transfer_s = findings.transfer.predicted_s
    findings.step = predict_step(*run, transfer_s=transfer_s)
    findings.balance = suggest_balance(*run, check, transfer_s=transfer_s, imbalance=args.imbalance)


def _add_prompts(findings: PreflightFindings, args: argparse.Namespace) -> None:
    # Imported here: the import takes a second, too long for reporting a wrong layout.
    from tools.preflight_parts.prompts import has_tokenizer, inspect_prompts

    assert findings.config is not None, "the configuration is composed first"
    if args.no_prompts or not has_tokenizer(findings.config):
        findings.notes.append("prompts and chat template were not checked: no tokenizer here")
        return
    try:
        findings.prompts, problems, notes = inspect_prompts(findings.config)
    except ValueError as error:
        problems, notes = [_config_error_problem(error)], []
    findings.problems += problems
    findings.notes += notes
    for file in findings.prompts:
        if file.key == "data.train" and (
            note := tree_note(findings.config, file.mean_prompt_tokens)
        ):
            findings.notes.append(note)


def _add_tool_calls(findings: PreflightFindings) -> None:
    from tools.preflight_parts.user_tools import call_user_tools

    assert findings.config is not None, "the configuration is composed first"
    try:
        findings.tool_calls, problems, notes = call_user_tools(findings.config)
    except ValueError as error:
        problems, notes = [_config_error_problem(error)], []
    # The prompts need the tools too.
    findings.problems += [problem for problem in problems if problem not in findings.problems]
    findings.notes += notes


def _add_workspaces(findings: PreflightFindings) -> None:
    from tools.preflight_parts.workspaces import check_workspaces

    assert findings.config is not None, "the configuration is composed first"
    try:
        problems, notes = check_workspaces(findings.config)
    except ValueError as error:
        problems, notes = [_config_error_problem(error)], []
    # The prompts are read by two checks.
    findings.problems += [problem for problem in problems if problem not in findings.problems]
    findings.notes += notes


def _config_error_problem(error: Exception) -> PreflightProblem:
    """Convert a configuration error to a problem.

    The key is in OmegaConf's error, in quotes in Hydra's message, or at the start of any other.
    """
    if isinstance(error, ConfigError):
        return PreflightProblem(error.key, error.problem, tuple(filter(None, [error.overrides])))
    message, cause = str(error), error.__cause__
    if isinstance(error, HydraException) and cause is not None:
        message = f"{message}: {cause}"
    key = getattr(error, "full_key", None) or getattr(cause, "full_key", None)
    first = message.removeprefix("override '")
    return PreflightProblem(key or re.split(r"[=:' ]", first, maxsplit=1)[0], message)


class _AmbiguousFlag(argparse.Action):
    """Rejects `--gpu`, which abbreviates two flags."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error(
            "--gpu: expected --gpus N, the number of available GPUs, or --gpu-gib GIB, the memory "
            "of one"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("overrides", nargs="*", help="as for python -m mega_agentrl")
    parser.add_argument("--model-config", type=Path, help="a config.json instead of model.path")
    parser.add_argument("--gpu-gib", type=float, default=80.0, help="memory of a GPU")
    parser.add_argument("--gpu", action=_AmbiguousFlag, help=argparse.SUPPRESS)
    parser.add_argument("--cpu", action="store_true", help="a run on CPUs, without a memory limit")
    parser.add_argument("--gpus", type=int, help="number of available GPUs (default: unknown)")
    parser.add_argument("--per-node", type=int, default=8, help="GPUs per node")
    parser.add_argument("--reserve", type=float, default=0.04, help="fraction of a GPU left free")
    parser.add_argument(
        "--imbalance", type=float, default=1.3, help="tokens of the busiest expert rank / mean"
    )
    parser.add_argument("--no-files", action="store_true", help="data files may be missing")
    parser.add_argument("--no-prompts", action="store_true", help="do not read the prompts")
    parser.add_argument(
        "--no-workspaces", action="store_true", help="do not run set-up and reward commands"
    )
    parser.add_argument("--json", action="store_true", help="print JSON with sizes in bytes")
    parser.add_argument(
        "--hardware", choices=list(SPEEDS), default="H100", help="device whose speeds are used"
    )
    parser.add_argument(
        "--response-tokens",
        type=float,
        help=f"expected mean (default: {MEAN_FRACTION} of rollout.max_response_tokens)",
    )
    parser.add_argument("--call-s", type=float, default=CALL_S, help="mean seconds of a tool call")
    for link in LinkType:
        flag = f"--{link.replace('_', '-')}-gbs"
        parser.add_argument(
            flag, type=float, help="GB/s per rank and direction (default: those of --hardware)"
        )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings; return 0 if the configuration can run, else 1."""
    args = _parser().parse_intermixed_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        findings = collect_findings(args, Path(folder))
    if args.json:
        print(json.dumps(as_json(findings), indent=2))
    else:
        print_report(findings, Console())
    return 1 if findings.problems else 0


if __name__ == "__main__":
    # transformers, which loads the tokenizer, works without torch if it cannot import it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns about the missing torch
    sys.exit(main())
