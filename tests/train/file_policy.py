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

    def save_checkpoint(self, folder, extra=None, keep=None):
        partial = checkpoint_folder.create_partial_folder(folder, "token")
        (partial / WEIGHT).write_text(json.dumps(self.weight))
        manifest = CheckpointManifest(
            number=checkpoint_folder.next_checkpoint_number(folder.parent),
            num_steps=0,
            num_adam_steps=0,
            num_ranks=1,
            layout={},
            dtype="float32",
            shape={},
            files={path.name: FileRecord.from_file(path) for path in partial.iterdir()},
            extra=checkpoint_folder.to_json_dict(extra or {}, "extra"),
        )
        checkpoint_folder.commit_folder(partial, folder, manifest)
        if keep is not None:
            checkpoint_folder.prune_checkpoints(folder.parent, keep)

    def load_checkpoint(self, folder):
        manifest = CheckpointManifest.read(folder)
        damage = checkpoint_folder.find_damage(folder, manifest, manifest.files, contents=True)
        if damage:
            raise RuntimeError(damage)
        self.weight = json.loads((folder / WEIGHT).read_text())
        return manifest.extra
