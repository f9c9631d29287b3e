"""Runs the set-up and the reward command of each row once, in a workspace that nobody has changed.

The set-up must succeed, and the reward must be 0: a reward command that succeeds before any change
rewards every attempt, and one that cannot be started rewards none. Rows with the same commands are
run once, since all workspaces start from the same files.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.sections.data import parse_data_files
from mega_agentrl.data.prompt_images import RemoteImageError
from mega_agentrl.data.rl_dataset import read_prompts
from mega_agentrl.estimate.preflight.report import PreflightProblem
from mega_agentrl.runtime.inputs import open_image_reader
from mega_agentrl.sandbox.workspace.pool import WorkspacePool
from mega_agentrl.tool.workspace import BashTool, EditTool
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.records import Prompt

_COMMANDS = ("setup_command", "reward_command")
_MAX_PROBLEMS = 10
"""Number of rows whose problem is shown; the others are counted."""
_MAX_OUTPUT_CHARS = 500
_NOT_STARTED = re.compile(r"\[exit code 12[67]\]$")
"""The end of the output if the shell finds no such program or cannot start it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceRow:
    """The commands of one or more rows."""

    key: str
    """Configuration key of the data."""
    prompt_id: str
    """The first of the rows."""
    commands: Mapping[str, str]
    """`setup_command` and `reward_command` of the rows; empty for the run's."""


def check_workspaces(config: TrainConfig) -> tuple[list[PreflightProblem], list[str]]:
    """Return the rows whose commands cannot work as problems, and notes.

    Raises:
        ValueError: The data cannot be read, or workspaces cannot run on this machine.
    """
    if not config.tool.workspace.is_enabled:
        return [], []
    rows, num_rows, notes = _find_rows(config)
    if not rows:
        return [], notes
    problems = asyncio.run(_run_all(config, rows))
    if not problems:
        notes.append(
            f"workspaces: {num_rows} rows with {len(rows)} different pairs of commands; the set-up "
            "succeeds and the reward is 0 before any change"
        )
    num_hidden = len(problems) - _MAX_PROBLEMS
    if num_hidden > 0:
        last = PreflightProblem(problems[-1].config_key, f"{num_hidden} more rows have a problem")
        problems = [*problems[:_MAX_PROBLEMS], last]
    return problems, notes


def _find_rows(config: TrainConfig) -> tuple[list[WorkspaceRow], int, list[str]]:
    """Return the rows with different commands, the number of all with commands, and notes."""
    found: dict[tuple[str, ...], WorkspaceRow] = {}
    num_rows, notes = 0, []
    for key in ("data.train", "data.validation"):
        files = parse_data_files(getattr(config.data, key.split(".")[1]), key)
        if not files or any(file.local_path is None for file in files):
            continue
        try:
            images = open_image_reader(config, None)
            prompts = read_prompts(files, config.data, key=key, images=images, keep_repeats=True)
        except RemoteImageError:
            notes.append(f"{key}: images at URLs, and the workspaces with them, are not checked")
            continue
        for item in prompts:
            commands = _commands_of(item.prompt)
            if commands is None:
                continue
            num_rows += 1
            row = WorkspaceRow(key=key, prompt_id=item.prompt.prompt_id, commands=commands)
            found.setdefault(tuple(commands.values()), row)
    return list(found.values()), num_rows, notes


def _commands_of(prompt: Prompt) -> dict[str, str] | None:
    """Return the commands of a row, None if it has no workspace."""
    tools = {name: kwargs for name, kwargs in prompt.tools_kwargs.items() if kwargs is not None}
    names = [name for name in tools or (BashTool.name,) if name in (BashTool.name, EditTool.name)]
    if not names:
        return None
    merged: dict[str, Any] = {}
    for name in names:
        merged |= tools.get(name, {}).get("create_kwargs") or {}
    return {command: merged.get(command) or "" for command in _COMMANDS}


async def _run_all(config: TrainConfig, rows: list[WorkspaceRow]) -> list[PreflightProblem]:
    """Run the commands of all rows, as many at once as there are workers."""
    pool = WorkspacePool(config.tool.workspace)
    tool = BashTool(config.tool.workspace, pool)
    slots = asyncio.Semaphore(config.tool.workspace.num_workers)

    async def run(row: WorkspaceRow) -> PreflightProblem | None:
        async with slots:
            return await _run_row(tool, row, config.tool.workspace.reward_timeout_s)

    await tool.start()
    try:
        found = await asyncio.gather(*map(run, rows))
    finally:
        await tool.close()
    return [problem for problem in found if problem is not None]


async def _run_row(tool: BashTool, row: WorkspaceRow, timeout_s: float) -> PreflightProblem | None:
    try:
        state = await tool.create(row.commands)
    except RuntimeError as error:
        return _problem(row, "setup_command", str(error))
    try:
        if not state.reward_command:
            return None
        result = await state.session.run_clean(state.reward_command, timeout_s)
    finally:
        await tool.release(state, {})
    shown = f"the reward command {state.reward_command!r:.200}"
    if result.status is ToolStatus.ok:
        what = f"{shown} succeeds before any change: every attempt would have the reward 1"
    elif result.status is ToolStatus.timeout:
        what = f"{shown} does not end within tool.workspace.reward_timeout_s={timeout_s:g}"
    elif result.status is ToolStatus.infra_error or _NOT_STARTED.search(result.output):
        what = f"{shown} cannot run: no attempt would have a reward"
    else:
        return None
    return _problem(row, "reward_command", f"{what}: {result.output[-_MAX_OUTPUT_CHARS:]}")


def _problem(row: WorkspaceRow, command: str, message: str) -> PreflightProblem:
    key = row.key if row.commands[command] else f"tool.workspace.{command}"
    return PreflightProblem(key, f"row {row.prompt_id}: {message}")
