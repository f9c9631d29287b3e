"""slurm/preflight.sh on a Slurm of two nodes."""

import re

import pytest

pytestmark = pytest.mark.slurm


def rows(output):
    """Return the cells of each node by column."""
    lines = output.splitlines()
    top = next(index for index, line in enumerate(lines) if line.startswith("node "))
    names = lines[top].split()
    starts = [match.start() for match in re.finditer(r"\S+", lines[top])]
    ends = [*starts[1:], None]
    table = {}
    for line in lines[top + 1 : top + 3]:
        cells = [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]
        table[cells[0]] = dict(zip(names, cells, strict=True))
    return table


def test_both_nodes_pass_except_for_limits_and_disks(jobs):
    code, output = jobs.end(jobs.submit(script="slurm/preflight.sh"), 300)
    found = rows(output)
    assert set(found) == {"n1", "n2"}
    for cells in found.values():
        assert cells["tcp"] == "2/2"
        assert cells["shared"] == "yes"
        assert cells["gloo"] == "eth0", "not the one of 127.0.1.1, the node's own name"
        assert cells["bwrap"] == "yes"
        assert cells["gpus"] == "no GPU" or re.match(r"\d+x", cells["gpus"])
        assert re.fullmatch(r"[+-]0\.\d\d s", cells["clock"])
        assert re.fullmatch(r"\d+ s", cells["imports"])
    assert found["n1"]["torch"] == found["n2"]["torch"]
    failures = re.findall(r"^FAIL (\S+ \S+):", output, re.MULTILINE)
    assert code == (1 if failures else 0), output
    # This machine itself may lack disk space or have low limits.
    assert {name.split()[1] for name in failures} <= {"disk", "limits"}, output
