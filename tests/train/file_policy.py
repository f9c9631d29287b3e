"""A policy whose whole state is one number, saved in checkpoints of the real format."""

from __future__ import annotations

import json

from mega_agentrl.actor import checkpoint_folder
from mega_agentrl.actor.checkpoint_folder import FileRecord, Manifest

WEIGHT = "metadata.json"
"""A checkpoint has a file of that name; here it holds the number."""


class FilePolicy:
    """`weight` is what was learned; the model's and the optimizer's part of a checkpoint."""

    def __init__(self, weight=0.0):
        self.weight = weight

    def save(self, folder, extra=None, keep=None):
        partial = checkpoint_folder.begin(folder, "token")
        (partial / WEIGHT).write_text(json.dumps(self.weight))
        manifest = Manifest(
            number=checkpoint_folder.next_number(folder.parent),
            num_steps=0,
            num_adam_steps=0,
            num_ranks=1,
            layout={},
            dtype="float32",
            shape={},
            files={path.name: FileRecord.of(path) for path in partial.iterdir()},
            extra=checkpoint_folder.as_json(extra or {}, "extra"),
        )
        checkpoint_folder.finish(partial, folder, manifest)
        if keep is not None:
            checkpoint_folder.prune(folder.parent, keep)

    def resume(self, folder):
        manifest = Manifest.read(folder)
        damage = checkpoint_folder.find_damage(folder, manifest, manifest.files, contents=True)
        if damage:
            raise RuntimeError(damage)
        self.weight = json.loads((folder / WEIGHT).read_text())
        return manifest.extra
