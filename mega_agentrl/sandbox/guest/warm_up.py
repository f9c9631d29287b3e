"""Warms the interpreter before the first call: imports modules and uses each of them once.

sympy and pandas import parts of themselves and fill caches on first use, which the fork of every
call would repeat. Using each common function once here takes sympy's calls from 39 to 9 ms. A fork
copies page tables: with the heap in huge pages a plain call takes a third less CPU time. The code
here is our own and leaves nothing in the namespace of the policy's code.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING

from mega_agentrl.sandbox.guest import syscalls

if TYPE_CHECKING:
    from collections.abc import Iterable

WARM_UP_CODE = {
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


def warm_up_interpreter(modules: Iterable[str]) -> None:
    """Import the modules and run their warm-up code; raises `ImportError`."""
    for name in modules:
        importlib.import_module(name)
        exec(WARM_UP_CODE.get(name, ""), {})
    gc.collect()
    gc.freeze()  # keeps the collector from copying every page in each fork
    syscalls.collapse_to_huge_pages()
