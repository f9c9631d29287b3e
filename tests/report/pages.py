"""Report pages for tests (a hand-made tree, a hostile tree, many trees), and a parser of them."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

from mega_agentrl.report.config_diff import ConfigDifference
from mega_agentrl.report.metrics_file import parse_metrics
from mega_agentrl.report.page.render import ReportPage
from mega_agentrl.report.tree_viewer.embedded_trees import TreeFileView, embed_tree
from mega_agentrl.report.tree_viewer.tree_json import tree_to_json
from mega_agentrl.types.images import PlacedImage
from tests.rollout.grown_trees import nested_tree

HOSTILE = (
    "</script><script>document.title='owned';globalThis.owned=1</script>"
    '<img src=x onerror="globalThis.owned=1">--><!--<script>\ud800\0\x1b[2J\u202e\u2028'
    "<a href='javascript:globalThis.owned=1' id=tree autofocus onfocus=owned=1>"
)


class PageReader(HTMLParser):
    """Elements with their attributes, and the text of a page."""

    def __init__(self, markup):
        super().__init__(convert_charrefs=True)
        self.elements, self.text = [], ""
        self.inline = []  # attributes and text of each script and style
        self._is_inline = False
        self.feed(markup)
        self.close()

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        self._is_inline = name in ("script", "style")
        if self._is_inline:
            self.inline.append((dict(attributes), []))

    def handle_endtag(self, name):
        self._is_inline = False

    def handle_data(self, data):
        self.text += data
        if self._is_inline:
            self.inline[-1][1].append(data)

    def data_blocks(self):
        """Data of the page's script by id."""
        return {one["id"]: json.loads("".join(text)) for one, text in self.inline if "id" in one}

    def all(self, name):
        return [attributes for element, attributes in self.elements if element == name]


def characters(token_ids):
    return [chr(token) for token in token_ids]


def hostile_tree():
    """The tree by hand, with everything that others write replaced."""
    tree = nested_tree()
    prompt = replace(
        tree.prompt,
        prompt_id=HOSTILE,
        data_source=HOSTILE,
        ground_truth=HOSTILE,
        messages=({"role": HOSTILE, "content": HOSTILE},),
    )
    tree.prompt = prompt
    for one in tree.trajectories:
        one.prompt, one.template_drift = prompt, HOSTILE
        one.tool_rewards = {HOSTILE: 1.0}
        one.entropies = [float("nan")] * len(one.entropies)
        one.logps = [float("-inf")] * len(one.logps)
        one.score = replace(
            one.score, answer=HOSTILE, reason=HOSTILE, value=float("nan"), parts={HOSTILE: 1.0}
        )
        one.turns = [
            replace(
                turn,
                text=HOSTILE,
                outcome=turn.outcome and replace(turn.outcome, tool=HOSTILE, answer=HOSTILE),
            )
            for turn in one.turns
        ]
    return tree


def tree_with_images(prompt_image, answer_image):
    """The tree by hand, with an image in its question and one in its first answer."""
    tree = nested_tree()
    parts = [{"type": "image", "image": prompt_image}, {"type": "text", "text": "What is this?"}]
    placed = (PlacedImage(start=1, image=prompt_image),)
    messages = ({"role": "user", "content": parts},)
    tree.prompt = replace(tree.prompt, messages=messages, images=placed)
    for one in tree.trajectories:
        one.prompt = tree.prompt
        one.images = (PlacedImage(start=30, image=answer_image),)
    return tree


def hostile_pieces(token_ids):
    return [HOSTILE for _ in token_ids]


def metrics():
    lines = [
        {"stage": "held_out_before", "step": 0, "sampled/reward": 0.25, "sampled/success": 0.5},
        *(
            {
                "stage": "rl",
                "step": step,
                "rollout/reward_unfiltered": step / 10,
                "rollout/entropy": 1 / step,
                "mismatch/logp_max_abs": float("inf") if step == 3 else 1e-6 * step,
                "time/rollout_s": 2.0,
                "time/update_s": float("nan") if step == 2 else 1.0,
                "perf/tokens_per_s": 1000.0,
                "perf/unique_tokens_per_s": 400.0,
                "tree/token_ratio": 2.5,
                "rollout/tool/search/num_calls": 4.0,
                "rollout/tool/search/num_ok": 3.0,
                "rollout/tool/search/num_timeout": 1.0,
                HOSTILE: 1.0,
            }
            for step in range(1, 9)
        ),
        {"stage": "held_out_after", "step": 8, "sampled/reward": 0.75, "sampled/success": 0.75},
    ]
    return parse_metrics(json.dumps(line) for line in lines)


def small_page():
    """Two steps: the tree by hand in both, the hostile one as second tree of the second."""
    plain = nested_tree()
    advantages = {one.trajectory_id: 0.5 for one in plain.trajectories}
    tree_files = [
        TreeFileView(
            key="step_000001",
            label="RL step 1",
            num_trees=5,
            trees=[embed_tree(3, tree_to_json(plain, characters, advantages))],
        ),
        TreeFileView(
            key="step_000008",
            label="RL step 8",
            num_trees=2,
            trees=[
                embed_tree(0, tree_to_json(plain)),
                embed_tree(1, tree_to_json(hostile_tree(), hostile_pieces)),
            ],
        ),
    ]
    return ReportPage(
        title=HOSTILE,
        subtitle=HOSTILE,
        log=metrics(),
        config_differences=[ConfigDifference(key=HOSTILE, default="1", value=HOSTILE)],
        tree_files=tree_files,
        max_colour_entropy=2.0,
        notes=[HOSTILE],
    )


def large_page(num_trees):
    """`num_trees` trees of four trajectories each, all of one step."""
    view = tree_to_json(nested_tree(), characters)
    trees = [embed_tree(index, view | {"id": f"set/{index}"}) for index in range(num_trees)]
    tree_file = TreeFileView(key="step_000001", label="RL step 1", num_trees=num_trees, trees=trees)
    return ReportPage(title="large", subtitle="", log=metrics(), tree_files=[tree_file])
