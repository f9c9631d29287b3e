"""A policy whose whole state is one number, saved in checkpoints of the real format."""

from __future__ import annotations

import json

from mega_agentrl.actor.checkpoint import checkpoint_dir as checkpoint_folder
from mega_agentrl.actor.checkpoint.checkpoint_dir import CheckpointManifest, FileRecord

WEIGHT = "metadata.json"
"""A checkpoint has a file of that name; here it holds the number."""


class FilePolicy:
    """`weight` is what was learned; the model's and the optimizer's part of a checkpoint."""

    def __init__(self, weight=0.0):
        self.weight = weight

    def start_save(self, folder):
        (folder / WEIGHT).write_text(json.dumps(self.weight))
        self._save_folder = folder
        return CheckpointManifest(
            number=0,
            num_steps=0,
            num_adam_steps=0,
            num_ranks=1,
            layout={},
            dtype="float32",
            shape={},
            files={},
        )

    def save_result(self, wait_s):
        return {path.name: FileRecord.from_file(path) for path in self._save_folder.iterdir()}

    def abandon_save(self):
        pass

    def load_checkpoint(self, folder):
        manifest = CheckpointManifest.read(folder)
        damage = checkpoint_folder.find_damage(folder, manifest, manifest.files, contents=True)
        if damage:
            raise RuntimeError(damage)
        self.weight = json.loads((folder / WEIGHT).read_text())
        return manifest.extra
