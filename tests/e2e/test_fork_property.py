"""A forked session against two separate runs: same variables, files and draws on both sides.

A program is a tree: chunks that a session runs, and branches forked from it in between. Every
node must end as a plain interpreter does that runs, in a folder of its own, the chunks on the
way from the root to the node's end.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mega_agentrl.config.enums import PythonMode
from mega_agentrl.config.sections.tools import PythonToolConfig
from mega_agentrl.sandbox.pool import SandboxPool

NAMES = ("a", "b", "c")
FILES = ("one", "two", "folder/three")
PRELUDE = (
    "import os, random\n"
    "a, b, c = 1, [1, 2], {'k': [3]}\n"
    "random.seed(11)\n"
    "os.makedirs('folder', exist_ok=True)\n"
)
STATE = """
import hashlib, os, random, sys
def _shown(value):
    return repr(value) if type(value).__module__ == 'builtins' else type(value).__name__
_state = {name: _shown(value) for name, value in sorted(globals().items())
          if not name.startswith('_') and type(value).__name__ not in
          ('module', 'function', 'type', 'generator')}
_files = {os.path.join(folder, name): (open(os.path.join(folder, name)).read(),
                                       os.stat(os.path.join(folder, name)).st_mode)
          for folder, _, names in os.walk('.') for name in sorted(names)
          if os.path.exists(os.path.join(folder, name))}
_draws = hashlib.md5(repr(random.getstate()).encode()).hexdigest()
_math = sys.modules['numpy'].random.get_state()[1].sum() if 'np' in globals() else None
print(_state, sorted(_files.items()), sorted(os.listdir('.')), _draws, _math, os.getcwd() != '/')
"""
REFERENCE = """
import contextlib, io, json, os, sys, types
folders_and_codes = json.load(sys.stdin)
if any("numpy" in code for _, codes in folders_and_codes for code in codes):
    import numpy  # once; the chunks that use it import it themselves
for folder, codes in folders_and_codes:
    if os.fork():
        assert os.wait()[1] == 0
        continue
    os.chdir(folder)
    module = types.ModuleType('__main__')
    sys.modules['__main__'] = module
    answers = []
    for code in codes:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, '<string>', 'exec'), module.__dict__)
        answers.append(out.getvalue().strip())
    print(json.dumps(answers), flush=True)
    os._exit(0)
"""


@dataclass
class Node:
    """A session's chunks, and branches as (number of chunks before the fork, node)."""

    chunks: list[str]
    branches: list[tuple[int, Node]] = field(default_factory=list)
    branch_first: bool = True


def guarded(statement):
    """The statement, whose error is an answer like any other."""
    body = "\n".join(f"    {line}" for line in statement.splitlines())
    return f"try:\n{body}\nexcept Exception as error:\n    print(type(error).__name__, error)"


names = st.sampled_from(NAMES)
files = st.sampled_from(FILES)
small = st.integers(-3, 9)
statements = st.one_of(
    st.builds("{} = {}".format, names, small),
    st.builds("{} = [{}, {}]".format, names, small, small),
    st.builds("{} = {}".format, names, names),  # two names of one object
    st.builds("{}.append({})".format, names, small),
    st.builds("{}.append({})".format, names, names),
    st.builds("{}[{}] = {}".format, names, small, small),
    st.builds("{} = {{'k': {}, 'n': {}}}".format, names, names, small),
    st.builds("{}['k'] = {}".format, names, small),
    st.builds("open('{}', 'w').write('{}' * 3)".format, files, small),
    st.builds("open('{}', 'a').write(repr({}))".format, files, names),
    st.builds("os.remove('{}')".format, files),
    st.builds("os.replace('{}', '{}')".format, files, files),
    st.builds("os.symlink('{}', 'link{}')".format, files, small),
    st.builds("os.chmod('{}', 0o6{}4)".format, files, st.integers(0, 7)),
    st.builds("os.mkdir('d{}'); os.chdir('d{}')".format, small, small),
    st.builds("{} = open('{}').read()".format, names, files),
    st.builds("import math, collections; {} = math.comb(9, abs({}))".format, names, small),
    st.builds("{} = collections.Counter('{}abca').most_common(1)".format, names, small),
    st.builds("random.seed({})".format, small),
    st.builds("{} = random.random(); print({})".format, names, names),
    st.builds("random.shuffle({})".format, names),
    st.builds("import numpy as np; np.random.seed({})".format, st.integers(0, 9)),
    st.builds("{} = float(np.random.rand()); print({})".format, names, names),
    st.builds("{} = np.arange(4).tolist()".format, names),
    st.builds("def f(x, seen=[]):\n    seen.append(x)\n    return list(seen) + [{}]".format, small),
    st.builds("{} = f({}); print({})".format, names, small, names),
    st.builds("class K:\n    n = {}\n    __repr__ = lambda self: f'K{{K.n}}'".format, small),
    st.builds("{} = K(); K.n += 1; print({})".format, names, names),
    st.builds("g = (i * i for i in range(9)); next(g); {} = next(g)".format, names),
    st.builds("{} = next(g); print({})".format, names, names),
    st.builds("print({}, {})".format, names, names),
)
chunks = st.lists(st.lists(statements, min_size=1, max_size=4), min_size=1, max_size=4).map(
    lambda groups: ["\n".join(guarded(line) for line in group) for group in groups]
)


@st.composite
def nodes(draw, depth=2):
    """A tree at most `depth` forks deep, with at most three sessions a node."""
    node = Node(draw(chunks), branch_first=draw(st.booleans()))
    for _ in range(draw(st.integers(0, 2)) if depth else 0):
        place = draw(st.integers(0, len(node.chunks)))
        node.branches.append((place, draw(nodes(depth=depth - 1))))
    return node


@pytest.fixture(scope="module")
def pool():
    config = PythonToolConfig(
        num_workers=1,
        preload_modules=["numpy"],
        memory_limit_mib=256,
        mode=PythonMode.stateful,
        timeout_s=120.0,
    )
    made = SandboxPool(config)
    asyncio.run(made.start())
    yield made
    made.close_now()


async def run_tree(session, node, past, found):
    """Run a node and its branches; `found`: the way to every end, and what was answered."""
    answers = []
    waiting = []
    for place in range(len(node.chunks) + 1):
        for branch in (branch for at, branch in node.branches if at == place):
            child = await session.fork()
            way = past + node.chunks[:place]
            if branch.branch_first:
                await run_tree(child, branch, way, found)
            else:
                waiting.append((child, branch, way))
        if place < len(node.chunks):
            answers.append((await session.run(node.chunks[place])).output)
    answers.append((await session.run(STATE)).output)
    found.append(([*past, *node.chunks, STATE], answers))
    for child, branch, way in waiting:
        await run_tree(child, branch, way, found)
    await session.close()


def separate_runs(folder, runs):
    """Answers of plain interpreters, of which each runs its codes one after the other."""
    folders_and_codes = [(str(folder / str(number)), codes) for number, codes in enumerate(runs)]
    for own, _ in folders_and_codes:
        Path(own).mkdir()
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE],
        input=json.dumps(folders_and_codes),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


async def check(pool, node, folder):
    session = await pool.open()
    found = []
    assert (await session.run(PRELUDE)).status.value == "ok"
    await run_tree(session, node, [], found)
    expected = separate_runs(folder, [[PRELUDE, *way] for way, _ in found])
    for (way, answers), whole in zip(found, expected, strict=True):
        # Only the node's own chunks were answered by its session.
        assert answers == whole[-len(answers) :], "\n---\n".join(way)


@pytest.mark.parametrize("num_trees", [6, pytest.param(20, marks=pytest.mark.extended)])
def test_forks_are_separate_runs(num_trees, pool, tmp_path_factory):
    @settings(max_examples=num_trees, suppress_health_check=[HealthCheck.too_slow])
    @given(node=nodes())
    def check_tree(node):
        asyncio.run(check(pool, node, tmp_path_factory.mktemp("separate")))

    check_tree()


async def test_a_fork_continues_the_generators_of_its_parent(pool):
    parent = await pool.open()
    draw = "import random, numpy\nprint(random.random(), numpy.random.rand())"
    await parent.run(draw)
    child = await parent.fork()
    first = (await parent.run(draw)).output
    assert (await child.run(draw)).output == first
    assert (await parent.run(draw)).output == (await child.run(draw)).output != first
    other = await pool.open()
    assert (await other.run(draw)).output != first
    for session in (parent, child, other):
        await session.close()


async def test_files_held_open_are_not_separated(pool):
    """Documented: what was opened before the fork is one file for both."""
    parent = await pool.open()
    await parent.run("file = open('held', 'w+', buffering=1); file.write('before\\n')")
    child = await parent.fork()
    await child.run("file.write('child\\n')")
    await parent.run("file.write('parent\\n'); file.seek(0)")
    read = "file.seek(0); print(file.read().split())"
    shared = [(await session.run(read)).output for session in (parent, child)]
    assert all("before" in text for text in shared)
    # Opened again by its name, it is each one's own.
    assert (await child.run("print(open('held').read())")).output == "before"
    for session in (parent, child):
        await session.close()
