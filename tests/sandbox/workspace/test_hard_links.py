"""Hard links in the overlay file systems of a workspace, and git, which checks them."""

import shutil
import subprocess

import pytest

from mega_agentrl.types.records import ToolStatus
from tests.sandbox.workspace.workspaces import output_of, shared_workspace_pool

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

COMMIT = "git -c user.name=a -c user.email=a@b commit --quiet --message=first"
CLONES = {
    "path": "git clone --quiet /workspace/origin {}",
    "relative path": "cd origin; git clone --quiet . {}; cd ..",
    "bare": "git clone --quiet --bare origin {}",
    "without variables": "env -i /usr/bin/git clone --quiet origin {}",
    "from another program": "bash -c 'bash -c \"git clone --quiet origin {}; :\"'",
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    folder.chmod(0o755)
    project = folder / "project"
    (project / "origin").mkdir(parents=True)
    script = f"git init --quiet; echo text > file; git add file; {COMMIT}"
    subprocess.run(["bash", "-ec", script], cwd=project / "origin", check=True)
    yield from shared_workspace_pool(root="host", folder=str(project))


async def test_repository_of_the_project_can_be_cloned_beside_it(session):
    child = await session.fork()
    for one in (session, child):
        for number, command in enumerate(CLONES.values()):
            await output_of(one, command.format(f"/workspace/copy{number}"))
            log = f"git -C copy{number} log --format=%s; git -C copy{number} fsck --strict"
            assert (await output_of(one, log)).startswith("first")
    await child.close()


async def test_clone_can_be_committed_to_packed_and_cloned_again(session):
    work = (
        "git clone --quiet origin copy && cd copy && echo more > other && git add other && "
        f"{COMMIT} && git gc --quiet && cd .. && git clone --quiet --local copy second"
    )
    await output_of(session, work)
    assert await output_of(session, "git -C second log --format=%s") == "first\nfirst"


async def test_other_programs_get_their_hard_links(session):
    await output_of(session, "ln origin/file link; echo new > own; ln own same; cp -al origin all")
    assert await output_of(session, "cat link all/file") == "text\ntext"
    assert await output_of(session, "stat -c %h own; [ own -ef same ] && echo one") == "2\none"


async def test_flood_of_hard_links_does_not_end_the_workspace(session):
    flood = (
        "import os\nopen('a', 'w').close()\nprint('begun', flush=True)\nos.fork()\n"
        "while True:\n    try: os.link('a', f'b{os.getpid()}')\n    except OSError: pass"
    )
    await output_of(session, f"cat > flood.py <<'end'\n{flood}\nend")
    result = await session.run("python3 flood.py", 1.0)
    assert result.status is ToolStatus.timeout
    assert await output_of(session, "ln flood.py again; stat -c %h again") == "2"
