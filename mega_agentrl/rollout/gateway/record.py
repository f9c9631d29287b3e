"""The answers of a session up to a fork, from which a second instance of the agent is answered.

The second instance starts from the same prompt. As long as its requests are those of the record, it
gets the recorded answers and no token is sampled. At the block where its parent forked, it samples
an answer of its own, and from there on it is a session like any other.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mega_agentrl.rollout.gateway.capture import Block, ContextTree
    from mega_agentrl.types.records import Generation


class SessionRecord:
    """Recorded answers by the digest of the block that they follow.

    Args:
        tree: The contexts of the parent.
        fork_block: Block before the fork, whose answer the second instance samples.
        running_blocks: Blocks of requests that ran at the same time, whose answers it samples, too.
    """

    def __init__(
        self, tree: ContextTree, fork_block: Block, running_blocks: Iterable[Block] = ()
    ) -> None:
        self._generations: dict[bytes, deque[Generation]] = {}
        self._fork_digest = fork_block.digest
        self._open = {fork_block.digest, *(block.digest for block in running_blocks)}
        self.has_ended = False
        """Whether the second instance has come to the fork."""
        stack = list(tree.roots)
        while stack:
            block = stack.pop()
            stack += block.continuations
            answers = [
                answer.generation for answer in block.continuations if answer.generation is not None
            ]
            if answers:
                self._generations[block.digest] = deque(answers)

    def next_generation(self, digest: bytes) -> Generation | None:
        """Return the next recorded answer after this block; None if there is none left."""
        answers = self._generations.get(digest)
        return answers.popleft() if answers else None

    def is_open(self, digest: bytes) -> bool:
        """Return whether the answer after this block may be sampled.

        Before the fork that holds for the blocks at the fork only, afterwards for all.
        """
        if digest in self._open:
            self.has_ended = True
        return self.has_ended

    def is_fork(self, digest: bytes) -> bool:
        """Return whether this is the block before the fork."""
        return digest == self._fork_digest
