"""Names that Megatron, vLLM and Ray do not publish are used in one module for each library.

The next upgrade begins here: with the new version, these tests name what is gone.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import mega_agentrl

PACKAGE = Path(mega_agentrl.__file__).parent
COMPAT = {
    "megatron": "mega_agentrl.actor.megatron_compat",
    "vllm": "mega_agentrl.generator.vllm_compat",
    "ray": "mega_agentrl.runtime.ray_compat",
}
PRIVATE = re.compile(r"_(?!_)\w+")
CHANGES = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)
"""Statements that change an attribute."""


def is_private(dotted):
    return any(PRIVATE.fullmatch(part) for part in dotted.split("."))


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path):
    return ast.parse(path.read_text())


@cache
def imported(path):
    """Return the dotted name of what each name stands for that is imported from a library."""
    names = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found = {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            found = {
                one.asname or one.name.partition(".")[0]: (
                    one.name if one.asname else one.name.partition(".")[0]
                )
                for one in node.names
            }
        else:
            continue
        names |= {name: full for name, full in found.items() if full.partition(".")[0] in COMPAT}
    return names


def full_name(path, node):
    """Return the dotted name of an expression within a library; None for any other."""
    if isinstance(node, ast.Name):
        return imported(path).get(node.id)
    if isinstance(node, ast.Attribute):
        outer = full_name(path, node.value)
        return f"{outer}.{node.attr}" if outer else None
    return None


def resolve(dotted):
    """Import what a dotted name stands for."""
    parts = dotted.split(".")
    for size in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for part in parts[size:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(dotted)


def names_of_subclasses(path):
    """Yield private names of a library's class that a subclass defines or uses."""
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.ClassDef):
            continue
        for base in filter(None, (full_name(path, base) for base in node.bases)):
            used = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            used |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
            private = {name for name in used if PRIVATE.fullmatch(name)}
            yield from (f"{base}.{name}" for name in private & set(dir(resolve(base))))


def private_names(path):
    """Return the private names of libraries that a module refers to."""
    found = {name for name in imported(path).values() if is_private(name)}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and (name := full_name(path, node)) and is_private(name):
            found.add(name)
    return found | set(names_of_subclasses(path))


def other_private_names(path):
    """Return private names that are looked up in objects of an unknown class."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") not in ("self", "cls"):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("attr"):
            found |= {one.value for one in node.args if isinstance(one, ast.Constant)}
    return {name for name in found if PRIVATE.fullmatch(str(name))} - OF_OTHERS - own_names()


@cache
def own_names():
    """Return the private names that the package defines."""
    nodes = [node for path in PACKAGE.rglob("*.py") for node in ast.walk(tree_of(path))]
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    stored = (node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store))
    return functions | {getattr(node, "attr", getattr(node, "id", "")) for node in stored}


OF_OTHERS = {
    "_C",
    "_accelerator_getAllocatorSettings",
    "_accelerator_setAllocatorSettings",
    "_Options",
    "_attn_implementation",
    "_cdata",
    "_dynamo",
    "_foreach_mul_",
    "_get_default_store",
    "_parameters",
    "_replace",
    "_schema",
    "_torchdynamo_orig_callable",
}
"""Private names of torch, transformers and Python."""


def changed_names(path):
    """Return the attributes of libraries' modules and classes that a module changes."""
    found = set()
    for node in ast.walk(tree_of(path)):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(node, CHANGES):
            found |= {full_name(path, one) for one in targets if isinstance(one, ast.Attribute)}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            found.add(full_name(path, node.args[0]))
    return found - {None}


def users(library):
    """Return the modules of the package that import a library, and its compatibility module."""
    paths = {path for path in PACKAGE.rglob("*.py") if f"{library}" in path.read_text()}
    return {
        module_name(path): path
        for path in paths
        if any(name.partition(".")[0] == library for name in imported(path).values())
    }


@pytest.mark.parametrize("library", COMPAT)
def test_private_names_and_changes_are_in_one_module(library):
    for module, path in users(library).items():
        found = private_names(path) | changed_names(path)
        found = {name for name in found if name.partition(".")[0] == library}
        found |= other_private_names(path)
        assert module == COMPAT[library] or not found, f"{module} uses {sorted(found)}"


@pytest.mark.parametrize("library", COMPAT)
def test_every_private_name_exists_in_the_installed_version(library):
    """With `-s` this prints the list."""
    importlib.import_module(COMPAT[library])
    names = sorted(private_names(users(library)[COMPAT[library]]))
    print(f"\n{library}: {len(names)} private names", *names, sep="\n    ")
    assert names
    for name in names:
        resolve(name)


@pytest.mark.parametrize("library", COMPAT)
def test_everything_says_until_when_it_is_needed(library):
    for name, value in vars(importlib.import_module(COMPAT[library])).items():
        is_own = getattr(value, "__module__", None) == COMPAT[library]
        if is_own and (inspect.isclass(value) or inspect.isfunction(value)):
            assert re.search(r"\bUntil\s", value.__doc__ or "") or name in HELPERS, name


HELPERS = {
    "init_device",
    "all_gather_uneven",
    "reduce_scatter_uneven",
    "_GradAccumulation",
    "_NoOpStream",
    "_ReportCudaTensorTypes",
    "_cpu_torch_view",
    "_maybe_move_tensor_to_cpu",
    "_module_view",
    "_redirect_to_cpu",
}
"""What a change is made of, or what makes all of them."""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from ray._private import services", {"ray._private.services"}),
        (
            "from vllm.config import Config\nConfig._check",
            {"vllm.config.Config._check"},
        ),
        ("import megatron.core as core\ncore.x._y()", {"megatron.core.x._y"}),
        (
            "from megatron.core.models.gpt import GPTModel\n"
            "class Mine(GPTModel):\n    def _postprocess(self): self._own()",
            {"megatron.core.models.gpt.GPTModel._postprocess"},
        ),
        ("from vllm.config import Config\nConfig.check(self._own)", set()),
    ],
    ids=["module", "attribute", "alias", "override", "public"],
)
def test_private_names_are_found(tmp_path, source, expected):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert private_names(path) == expected


@pytest.mark.parametrize(
    "change",
    ["Model.run = None", "setattr(Model, name, None)", "del Model.run", "Model.inner.run: int = 1"],
    ids=["assigned", "setattr", "deleted", "nested"],
)
def test_changes_are_found(tmp_path, change):
    path = tmp_path / "module.py"
    path.write_text(f"from vllm.models import Model\n{change}\nself.run = Model.run")
    assert len(changed_names(path)) == 1
