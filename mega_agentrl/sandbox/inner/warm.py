"""Warms the interpreter before the first call: imports, and a first use where it pays.

sympy and pandas import part of themselves, and fill caches, when they are first used; every
call's fork would do it again. One use of each common function here takes sympy's calls from
39 to 9 ms. A fork copies page tables: with the heap in huge pages a plain call takes a third less
of the processor. What runs here is ours and leaves nothing in the namespace of the policy's code.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING

from mega_agentrl.sandbox.inner import kernel

if TYPE_CHECKING:
    from collections.abc import Iterable

FIRST_USE = {
    "numpy": "import numpy as np; np.linalg.inv(np.eye(2)); np.random.seed(0)",
    "sympy": (
        "from sympy import *; x = symbols('x'); solve(expand((x - 1) * (x + 5)), x); "
        "simplify(sin(x)**2 + cos(x)**2); integrate(x**3, x); str(factor(x**2 - 1))"
    ),
    "pandas": (
        "import pandas as pd; table = pd.DataFrame({'a': [1, 1], 'b': [1, 2]}); str(table); "
        "table.groupby('a')['b'].sum().to_dict()"
    ),
}


def warm(modules: Iterable[str]) -> None:
    """Import the modules and use those that gain from it; raises `ImportError`."""
    for name in modules:
        importlib.import_module(name)
        exec(FIRST_USE.get(name, ""), {})
    gc.collect()
    gc.freeze()  # keeps the collector from copying every page in each fork
    kernel.use_huge_pages()
