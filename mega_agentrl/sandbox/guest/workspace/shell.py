"""One call of a workspace's shell: a bash that continues from the state of the call before.

Every call runs in a bash of its own, which first sources the *state* (working folder, variables,
functions, aliases, options, umask) and writes the new state when it ends. A bash that lives from
call to call was not chosen: `exit`, `exec`, `set -e`, a crash and a timeout would all end it, so
that the state would have to be saved at each call anyway; the end of its call would have to be read
from its output, which the policy's code can imitate; and at a fork its state could be copied no
better. This way a call ends when its process ends, a call that fails changes no state, and calls,
restarts and forks all continue by the same, much used, code. A call takes some ms longer.

Not kept: open descriptors, traps, positional parameters, the table of jobs (background processes
run on), `$?` and the random seed. A state that was not written completely, because the bash was
killed or replaced itself with `exec`, or that is larger than 1 MiB, is not taken: the next call
continues from the state before.
"""

from __future__ import annotations

import os
import random
import shlex

MAX_COMMAND_BYTES = 100_000
"""The kernel's limit for one argument is 128 KiB."""

_MAX_STATE_BYTES = 1 << 20
_STATE_FD = 250
_NEW_STATE_FD = 251
_END = b"#end\n"

# Written so that they can be sourced in this order. Aliases come last, since they would change what
# follows, and options before them, since they may change how errors end the shell.
_SAVE = (
    "{ \\builtin umask -p; \\builtin shopt -p; \\builtin declare -f; \\builtin declare -Fx; "
    "\\builtin declare -p; \\builtin printf '\\\\builtin cd -- %q\\n' \"$PWD\"; "
    "\\builtin shopt -po; \\builtin alias -p; \\builtin echo '#end'; } "
    f"2>/dev/null >&{_NEW_STATE_FD}"
)
_SAVE_TRAP = shlex.quote(_SAVE)


def initial_state(variables: dict[str, str], folder: str) -> str:
    """Return the state of a new shell."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines += [f"cd -- {shlex.quote(folder)}", "umask 022", "shopt -s expand_aliases"]
    return "\n".join([*lines, _END.decode()])


def shell_arguments(command: str) -> list[bytes]:
    """Return the arguments of the bash that runs `command` in one call.

    The whole script is one line, so that line numbers in error messages are those of the command.
    The state is saved at the end of the command, whatever it has set as its own EXIT trap, and, by
    a trap, at `exit`.
    """
    steps = [
        f"\\builtin source /dev/fd/{_STATE_FD} >/dev/null 2>&1",
        f"RANDOM={random.SystemRandom().randrange(1 << 15)}",
        "\\builtin unset BASH_EXECUTION_STRING",
        f"\\builtin trap -- {_SAVE_TRAP} EXIT",
        # Programs do not get the descriptor of the state that was read.
        f"\\builtin eval {shlex.quote(command)} {_STATE_FD}<&-",
        f'\\builtin trap -- {_SAVE_TRAP}"; \\builtin exit $?" EXIT',
    ]
    return [b"bash", b"-c", "; ".join(steps).encode("utf-8", "surrogateescape")]


class ShellState:
    """The state of a shell between its calls.

    Attributes:
        text: Bash code that sets it up.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def write_to_memory(self) -> tuple[int, int]:
        """Return descriptors of two files in memory: this state, and an empty one for the next."""
        state_fd, new_state_fd = (os.memfd_create(name) for name in ("state", "new-state"))
        data = memoryview(self.text.encode("utf-8", "surrogateescape"))
        while data:
            data = data[os.write(state_fd, data) :]
        return state_fd, new_state_fd

    def read_from_memory(self, new_state_fd: int) -> bool:
        """Take the state that a call has written; return False if it is incomplete or too large."""
        data = os.pread(new_state_fd, _MAX_STATE_BYTES + 1, 0)
        if len(data) > _MAX_STATE_BYTES or not data.endswith(b"\n" + _END):
            return False
        self.text = data.decode("utf-8", "surrogateescape")
        return True


def move_to_shell(state_fd: int, new_state_fd: int) -> None:
    """Give the descriptors of `ShellState.write_to_memory` the numbers that the script uses."""
    os.dup2(state_fd, _STATE_FD)
    os.dup2(new_state_fd, _NEW_STATE_FD)
