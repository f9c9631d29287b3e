"""Writes the tasks of a verifiers environment as RL parquet.

    python tools/convert_verifiers.py --environment '{taskset: {id: gsm8k-v1}}' --output FILE

`--environment` is the option of `rollout.agents.environments.verifiers.VerifiersAgent`, as YAML.
Loading the tasks may download what the environment needs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from mega_agentrl.data.converters.file_io import check_output_path, write_rl_parquet
from mega_agentrl.rollout.agents.environments.verifiers import VerifiersAgent

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file; return 2 if it cannot be written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--environment", required=True, metavar="YAML")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE")
    parser.add_argument("--limit", type=int, metavar="N", help="write the first N tasks only")
    parser.add_argument("--force", action="store_true", help="write over an existing file")
    args = parser.parse_args(arguments)
    try:
        check_output_path(args.output, force=args.force)
        agent = VerifiersAgent(environment=yaml.safe_load(args.environment))
        rows = agent.rl_rows(args.limit)
        write_rl_parquet(rows, args.output, force=args.force)
    except (ValueError, yaml.YAMLError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: {len(rows)} rows of {agent.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
