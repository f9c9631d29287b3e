"""The report of a run as one HTML file that needs nothing else: no network, no build step.

Charts are drawn here; the viewer of rollout trees is drawn in the browser by the scripts in
`assets/`. The page's security policy allows the one script and the one style sheet by their
hashes and nothing else, so that no text of a policy or a tool can run, load or send anything;
all of it enters the page as text besides (`markup`). Reads no file of a run: that is
`train.run_report`'s.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from mega_agentrl.report.chart_choice import chart_groups
from mega_agentrl.report.charts import chart_data, figure
from mega_agentrl.report.headline import tile_row, tiles
from mega_agentrl.report.held_out_table import held_out_table
from mega_agentrl.report.markup import Markup, data_block, joined, tag, text
from mega_agentrl.report.tool_table import tool_rows, tool_table
from mega_agentrl.report.tree_blocks import blocks_markup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.report.chart_choice import ChartGroup
    from mega_agentrl.report.config_diff import Difference
    from mega_agentrl.report.metric_log import MetricLog
    from mega_agentrl.report.tree_blocks import TreeShelf

STYLES = ("page.css", "viewer.css")
SCRIPTS = ("dom.js", "charts.js", "tree.js", "talk.js", "viewer.js")
_FIRST_GROUP = "Learning"


@dataclass(slots=True, kw_only=True, frozen=True)
class Page:
    """What the page shows.

    lead: the line below the title. notes: what is missing and why, sentences. most_entropy: at
    which the colours of tokens end, nats.
    """

    title: str
    lead: str
    log: MetricLog
    differences: Sequence[Difference] = ()
    shelves: Sequence[TreeShelf] = ()
    most_entropy: float = 1.0
    notes: Sequence[str] = field(default_factory=tuple)


@dataclass(slots=True, kw_only=True, frozen=True)
class _Section:
    name: str
    title: str
    body: Markup


def render_page(page: Page) -> str:
    """The file's text, pure UTF-8 without halves of surrogate pairs."""
    chart_blocks: list[Markup] = []
    sections = _sections(page, chart_blocks)
    style = "\n".join(_asset(name) for name in STYLES)
    script = '(() => {\n"use strict";\n' + "\n".join(_asset(name) for name in SCRIPTS) + "})();"
    links = [tag("a", section.title, href=f"#{section.name}") for section in sections]
    return Template(_asset("page.html")).substitute(
        policy=_policy(style, script),
        style=style,
        script=script,
        title=text(page.title),
        lead=text(page.lead),
        links=joined(links),
        tiles=tile_row(tiles(page.log)),
        sections="\n".join(
            tag("section", tag("h2", section.title), section.body, id=section.name)
            for section in sections
        ),
        closing=joined([tag("p", note) for note in page.notes]),
        data="\n".join([*chart_blocks, blocks_markup(page.shelves, page.most_entropy)]),
    )


def _sections(page: Page, blocks: list[Markup]) -> list[_Section]:
    """The page from top to bottom; adds the data of the charts to `blocks`."""
    groups = {group.title: group for group in chart_groups(page.log)}
    found = []
    if _FIRST_GROUP in groups:
        found.append(_chart_section(groups.pop(_FIRST_GROUP), blocks))
    held_out = page.log.held_out()
    if held_out:
        found.append(_table_section("held-out-numbers", "Held out", held_out_table(held_out)))
    if any(shelf.blocks for shelf in page.shelves):
        found.append(_Section(name="rollouts", title="Rollout trees", body=_viewer()))
    if rows := tool_rows(page.log):
        found.append(_table_section("tool-outcomes", "Tool outcomes", tool_table(rows)))
    found += [_chart_section(group, blocks) for group in groups.values()]
    if page.differences:
        found.append(_table_section("settings", "Settings", _settings(page.differences)))
    return found


def _chart_section(group: ChartGroup, blocks: list[Markup]) -> _Section:
    figures = []
    for chart in group.charts:
        name = f"chart-{len(blocks)}"
        blocks.append(data_block(name, chart_data(chart)))
        figures.append(figure(chart, name))
    body = tag("div", *figures, class_="charts")
    if group.folded:
        rest = f", {group.num_left_out} more are in metrics.jsonl" if group.num_left_out else ""
        body = tag("details", tag("summary", f"{len(figures)} charts{rest}"), body)
    slug = "".join(char if char.isalnum() else "-" for char in group.title.lower())
    return _Section(name=f"charts-{slug}", title=group.title, body=body)


def _table_section(name: str, title: str, table: Markup) -> _Section:
    body = tag("div", tag("div", table, class_="scroll"), class_="card")
    return _Section(name=name, title=title, body=body)


def _settings(differences: Sequence[Difference]) -> Markup:
    head = tag("tr", *(tag("th", name, scope="col") for name in ("key", "this run", "default")))
    body = [
        tag("tr", tag("th", one.key, scope="row"), tag("td", one.value), tag("td", one.default))
        for one in differences
    ]
    table = tag("thead", head), tag("tbody", *body)
    return tag("table", *table, class_="figures text", id="differences")


def _viewer() -> Markup:
    return Markup(_asset("viewer.html"))


def _asset(name: str) -> str:
    return files("mega_agentrl.report").joinpath("assets", name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Nothing is allowed but what the page itself brought."""
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(inline: str) -> str:
    digest = hashlib.sha256(inline.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
