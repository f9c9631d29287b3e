"""Driver that slurm/train.sh starts in most of its tests: joins Ray and follows instructions.

`python tiny_driver.py run_dir=FOLDER do=WHAT cluster.ray_address=HOST:PORT`. Each start writes
`start-<n>.json` with the names of the Ray nodes and what it sees of an image, in FOLDER. WHAT:
`end-<code>`: exit with that code. `hold`: wait for USR1, write the start's number into `saved` and
exit with 75; at TERM exit with 9. Several separated by commas: one per start.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

HOLD_S = 500


def main() -> int:
    settings = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    folder = Path(settings["run_dir"])
    if "--cfg" in sys.argv:
        assert sys.argv[-4:] == ["--cfg", "job", "--package", "run_dir"], sys.argv
        print(folder)
        return 0
    signals_received = []
    signal.signal(signal.SIGUSR1, lambda *_: signals_received.append("USR1"))
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    import ray

    ray.init(address=settings["cluster.ray_address"], log_to_driver=False)
    # After Ray has installed its own handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
    nodes = {node["NodeName"]: node["Alive"] for node in ray.nodes()}
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        "nodes": nodes,
        "job": os.environ["SLURM_JOB_ID"],
        "cpus": ray.cluster_resources()["CPU"],
        "image": Path("/etc/image").is_file(),
    }
    (folder / "start.part").write_text(json.dumps(report))
    (folder / "start.part").rename(folder / f"start-{start}.json")
    action = settings["do"].split(",")[start]
    if action.startswith("end-"):
        return int(action.removeprefix("end-"))
    end_s = time.monotonic() + HOLD_S
    while not signals_received and time.monotonic() < end_s:
        time.sleep(0.1)
    (folder / "saved").write_text(str(start))
    return 75 if signals_received else 1


if __name__ == "__main__":
    sys.exit(main())
