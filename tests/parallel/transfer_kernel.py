"""Compiles the loop that copies weights, when the server of rank processes imports this module.

Each of its forks has the loop then, which takes two seconds to compile.
"""

from mega_agentrl.reshard.verify.copy_table import compile_kernel

compile_kernel()
