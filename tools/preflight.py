"""Says whether a configuration can run, before anything starts: on a login node, without a GPU.

    python tools/preflight.py experiment=qwen3_32b_64gpu model.path=... data.train=... [key=value]
    python tools/preflight.py experiment=qwen3_32b_64gpu --no-files \
        --model-config tools/model_configs/qwen3-32b.json

Checks the configuration as the run does, then estimates memory of a policy rank and of an engine
rank part by part against the GPU (`--gpu-gib`), the weight transfer over the links (`--*-gbs`),
and reads the prompts where data and tokenizer are there. Models: Llama, Qwen2, Qwen3, Qwen3Moe;
a folder with config.json is enough. Exit code 1: it cannot run, with the key and what would do.
torch is never imported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mega_agentrl.estimate.device import Device  # noqa: E402
from mega_agentrl.estimate.transfer import transfer  # noqa: E402
from mega_agentrl.estimate.verdict import Problem, judge  # noqa: E402
from mega_agentrl.reshard.links import Link, LinkSpeeds  # noqa: E402
from mega_agentrl.reshard.model_shape import ModelShape  # noqa: E402
from tools.preflight_parts.compose import checker, compose_config, model_folder  # noqa: E402
from tools.preflight_parts.show import Findings, as_json, show  # noqa: E402


def look(options: argparse.Namespace, folder: Path) -> Findings:
    """Everything there is to find out. folder: for files of this one's own."""
    found = Findings()
    try:
        device = Device(
            gib=None if options.cpu else options.gpu_gib,
            per_node=options.per_node,
            reserve=options.reserve,
        )
        path = model_folder(options.model_config, folder) if options.model_config else None
        config = compose_config(options.overrides, model_path=path)
        found.config, found.device = config, device
        check = checker(folder, files=not options.no_files)
        check(config)
        found.shape = shape = ModelShape.from_folder(config.model.path)
        found.verdict = judge(
            config, shape, device, check, num_gpus=options.gpus, imbalance=options.imbalance
        )
        found.problems += found.verdict.problems
        found.notes += found.verdict.notes
        if not found.problems:
            given = {str(link): getattr(options, f"{link}_gbs") * 1e9 for link in Link}
            found.transfer = transfer(config, shape, device, LinkSpeeds(**given))
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        found.problems.append(_refusal(error))
    else:
        _add_prompts(found, options)
    return found


def _add_prompts(found: Findings, options: argparse.Namespace) -> None:
    # Its imports take a second, which a wrong layout need not wait for.
    from tools.preflight_parts.prompts import has_tokenizer, look_at_prompts

    assert found.config is not None, "prompts come after the configuration"
    if options.no_prompts or not has_tokenizer(found.config):
        found.notes.append("prompts and chat template were not looked at: no tokenizer here")
        return
    try:
        found.prompts, problems, notes = look_at_prompts(found.config)
    except ValueError as error:
        problems, notes = [_refusal(error)], []
    found.problems += problems
    found.notes += notes


def _refusal(error: Exception) -> Problem:
    """An error of the configuration's own as a problem: OmegaConf says the key, an override has
    it in quotes, other messages begin with it.
    """
    message, cause = str(error), error.__cause__
    if isinstance(error, HydraException) and cause is not None:
        message = f"{message}: {cause}"
    key = getattr(error, "full_key", None) or getattr(cause, "full_key", None)
    first = message.removeprefix("override '")
    return Problem(key or re.split(r"[=:' ]", first, maxsplit=1)[0], message)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("overrides", nargs="*", help="as for python -m mega_agentrl")
    parser.add_argument("--model-config", type=Path, help="a config.json instead of model.path")
    parser.add_argument("--gpu-gib", type=float, default=80.0, help="memory of a GPU")
    parser.add_argument("--cpu", action="store_true", help="a run on CPUs, without a bound")
    parser.add_argument("--gpus", type=int, help="GPUs that there are in all")
    parser.add_argument("--per-node", type=int, default=8, help="GPUs of a machine")
    parser.add_argument("--reserve", type=float, default=0.04, help="share of a GPU left free")
    parser.add_argument(
        "--imbalance", type=float, default=1.3, help="tokens of the busiest expert rank / mean"
    )
    parser.add_argument("--no-files", action="store_true", help="data need not be there")
    parser.add_argument("--no-prompts", action="store_true", help="do not read the prompts")
    parser.add_argument("--json", action="store_true", help="plain values, bytes")
    for link in Link:
        flag = f"--{link.replace('_', '-')}-gbs"
        default = getattr(LinkSpeeds(), link) / 1e9
        parser.add_argument(flag, type=float, default=default, help="GB/s a rank and direction")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """0: it can run. 1: it cannot."""
    options = _parser().parse_intermixed_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = look(options, Path(folder))
    if options.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        show(found, Console())
    return 1 if found.problems else 0


if __name__ == "__main__":
    # transformers, which reads the tokenizer, does without torch where it finds none.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # which it need not say
    sys.exit(main())
