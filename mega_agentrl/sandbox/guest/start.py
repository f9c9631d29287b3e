"""Program that starts a module of this package: `start.py MODULE ARGUMENT` calls its `main`.

It is a file and not the text of `python -c`, because Python 3.13 keeps such a text and would show
its lines in the tracebacks of the policy's code, whose name is `<string>` too.
"""

import importlib
import sys

if __name__ == "__main__":
    sys.path.insert(0, __file__.rsplit("/", 4)[0])
    module = importlib.import_module(f"mega_agentrl.sandbox.guest.{sys.argv[1]}")
    del sys.path[0]
    module.main(sys.argv[2])
