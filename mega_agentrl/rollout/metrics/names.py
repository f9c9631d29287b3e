"""Bounds the names in metric keys that come from others: from the policy, tools, agents, functions.

Every such name passes `MetricNames`, so that nobody can fill the metrics file, the report page and
the trackers with keys: neither in a step nor, with new names in each, over a run (`NamesOfRun`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from mega_agentrl.rollout.conversation.messages import TOOL_NAME_PATTERN

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

MAX_NAMES = 64
"""Names of one kind in the metrics of a run: more lines than a chart can show, and more tools than
a prompt has room for."""

OTHER, UNKNOWN = "other", "unknown"
FIELD_PATTERN = re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,64}")
"""Well-formed names of fields, which may be words of any language."""


class NamesOfRun:
    """The names of a run that are in metric keys, by kind; a resumed run begins anew."""

    def __init__(self) -> None:
        self._names: defaultdict[str, set[str]] = defaultdict(set)

    def of_kind(self, kind: str) -> set[str]:
        """Return the names of a kind, to which `MetricNames` adds those of a step."""
        return self._names[kind]


class MetricNames:
    """The names of one kind in a step, by what stands for them in metric keys.

    A malformed name, and one that the policy made up, becomes `unknown`. Of the others those are
    kept that the run has had, and of new ones the most frequent, until the run has `MAX_NAMES`; the
    rest becomes `other`.

    Args:
        names: all occurrences of names.
        earlier: names of this kind in the run, to which the new ones are added.
        made_up: names that are known to be of the policy's invention.
        pattern: what a well-formed name looks like.
    """

    def __init__(
        self,
        names: Iterable[str],
        earlier: set[str],
        made_up: Collection[str] = (),
        pattern: re.Pattern[str] = TOOL_NAME_PATTERN,
    ) -> None:
        counts = Counter(name for name in names if pattern.fullmatch(name) and name not in made_up)
        new = sorted(counts.keys() - earlier, key=lambda name: (-counts[name], name))
        earlier.update(new[: max(0, MAX_NAMES - len(earlier))])
        self._kept = counts.keys() & earlier
        self._others = counts.keys() - earlier

    def __getitem__(self, name: str) -> str:
        """Return what stands for a name."""
        if name in self._kept:
            return name
        return OTHER if name in self._others else UNKNOWN
