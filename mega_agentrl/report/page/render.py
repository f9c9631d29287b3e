"""Render the report of a run as one self-contained HTML file.

Charts are rendered here; the scripts in `assets/` draw the tree viewer in the browser. The content
security policy allows only the page's own script and style sheet, by their hashes, so that text of
a policy or a tool cannot run, load or send anything. All such text is escaped as well (`html`).
This module reads no files of a run; `train.output.report_page` does.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from mega_agentrl.report.page.chart_groups import chart_groups
from mega_agentrl.report.page.html import (
    SafeHtml,
    concat_html,
    escape_text,
    html_element,
    json_script_element,
)
from mega_agentrl.report.page.summary_tiles import render_tiles, summary_tiles
from mega_agentrl.report.page.svg_charts import chart_data, render_figure
from mega_agentrl.report.page.tables import tool_rows, tool_table, validation_table
from mega_agentrl.report.tree_viewer.embedded_trees import render_embedded_trees

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.report.config_diff import ConfigDifference
    from mega_agentrl.report.metrics_file import MetricLog
    from mega_agentrl.report.page.chart_groups import ChartGroup
    from mega_agentrl.report.tree_viewer.embedded_trees import TreeFileView

STYLE_FILES = ("page.css", "viewer.css")
SCRIPT_FILES = ("dom.js", "charts.js", "tree.js", "talk.js", "viewer.js")
_LEADING_GROUP = "Learning"


@dataclass(slots=True, kw_only=True, frozen=True)
class ReportPage:
    """Content of the page."""

    title: str
    """Title of the page."""
    subtitle: str
    """Line below the title."""
    log: MetricLog
    """Metrics of the run."""
    config_differences: Sequence[ConfigDifference] = ()
    """Settings that differ from the defaults."""
    tree_files: Sequence[TreeFileView] = ()
    """Rollout trees by file."""
    max_colour_entropy: float = 1.0
    """Entropy in nats at which the colour scale of tokens ends."""
    notes: Sequence[str] = field(default_factory=tuple)
    """Sentences about missing content."""


@dataclass(slots=True, kw_only=True, frozen=True)
class _Section:
    anchor: str
    title: str
    body: SafeHtml


def render_page(page: ReportPage) -> str:
    """Return the page as text without lone surrogates."""
    chart_blocks: list[SafeHtml] = []
    sections = _sections(page, chart_blocks)
    style = "\n".join(_read_asset(name) for name in STYLE_FILES)
    script = (
        '(() => {\n"use strict";\n'
        + "\n".join(_read_asset(name) for name in SCRIPT_FILES)
        + "})();"
    )
    links = [html_element("a", section.title, href=f"#{section.anchor}") for section in sections]
    return Template(_read_asset("page.html")).substitute(
        policy=_content_security_policy(style, script),
        style=style,
        script=script,
        title=escape_text(page.title),
        lead=escape_text(page.subtitle),
        links=concat_html(links),
        tiles=render_tiles(summary_tiles(page.log)),
        sections="\n".join(
            html_element(
                "section", html_element("h2", section.title), section.body, id=section.anchor
            )
            for section in sections
        ),
        closing=concat_html([html_element("p", note) for note in page.notes]),
        data="\n".join(
            [*chart_blocks, render_embedded_trees(page.tree_files, page.max_colour_entropy)]
        ),
    )


def _sections(page: ReportPage, blocks: list[SafeHtml]) -> list[_Section]:
    """Return the sections in order; adds the data of the charts to `blocks`."""
    groups = {group.title: group for group in chart_groups(page.log)}
    found = []
    if _LEADING_GROUP in groups:
        found.append(_chart_section(groups.pop(_LEADING_GROUP), blocks))
    validation_lines = page.log.validation_lines()
    if validation_lines:
        found.append(
            _table_section("held-out-numbers", "Held out", validation_table(validation_lines))
        )
    if any(file.trees for file in page.tree_files):
        found.append(_Section(anchor="rollouts", title="Rollout trees", body=_tree_viewer_html()))
    if rows := tool_rows(page.log):
        found.append(_table_section("tool-outcomes", "Tool outcomes", tool_table(rows)))
    found += [_chart_section(group, blocks) for group in groups.values()]
    if page.config_differences:
        found.append(
            _table_section("settings", "Settings", _settings_table(page.config_differences))
        )
    return found


def _chart_section(group: ChartGroup, blocks: list[SafeHtml]) -> _Section:
    figures = []
    for chart in group.charts:
        name = f"chart-{len(blocks)}"
        blocks.append(json_script_element(name, chart_data(chart)))
        figures.append(render_figure(chart, name))
    body = html_element("div", *figures, class_="charts")
    if group.is_collapsed:
        rest = f", {group.num_omitted} more are in metrics.jsonl" if group.num_omitted else ""
        body = html_element(
            "details", html_element("summary", f"{len(figures)} charts{rest}"), body
        )
    slug = "".join(char if char.isalnum() else "-" for char in group.title.lower())
    return _Section(anchor=f"charts-{slug}", title=group.title, body=body)


def _table_section(name: str, title: str, table: SafeHtml) -> _Section:
    body = html_element("div", html_element("div", table, class_="scroll"), class_="card")
    return _Section(anchor=name, title=title, body=body)


def _settings_table(differences: Sequence[ConfigDifference]) -> SafeHtml:
    head = html_element(
        "tr", *(html_element("th", name, scope="col") for name in ("key", "this run", "default"))
    )
    body = [
        html_element(
            "tr",
            html_element("th", one.key, scope="row"),
            html_element("td", one.value),
            html_element("td", one.default),
        )
        for one in differences
    ]
    table = html_element("thead", head), html_element("tbody", *body)
    return html_element("table", *table, class_="figures text", id="differences")


def _tree_viewer_html() -> SafeHtml:
    return SafeHtml(_read_asset("viewer.html"))


def _read_asset(name: str) -> str:
    return files("mega_agentrl.report").joinpath("assets", name).read_text(encoding="utf-8")


def _content_security_policy(style: str, script: str) -> str:
    """Return a policy that allows only the inline style and script of the page."""
    return (
        f"default-src 'none'; style-src {_csp_hash(style)}; script-src {_csp_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _csp_hash(inline: str) -> str:
    digest = hashlib.sha256(inline.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
