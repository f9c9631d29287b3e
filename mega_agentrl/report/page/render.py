"""Render the report of a run as one self-contained HTML file.

Charts are rendered here; the scripts in `assets/` draw the tree viewer in the browser. The content
security policy allows only the page's own script and style sheet, by their hashes, and images
within the page, so that text of a policy or a tool cannot run, load or send anything. All such text
is escaped as well (`html`). This module reads no files of a run; `train.output.report_page` does.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING

from markupsafe import Markup

from mega_agentrl.report.page.chart_groups import chart_groups
from mega_agentrl.report.page.failure_banner import failure_lines
from mega_agentrl.report.page.html import json_for_script, json_script_element, render_template
from mega_agentrl.report.page.summary_tiles import render_tiles, summary_tiles
from mega_agentrl.report.page.svg_charts import chart_data, render_figure
from mega_agentrl.report.page.tables import tool_rows, tool_table, validation_table
from mega_agentrl.report.tree_viewer.embedded_trees import render_embedded_trees

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.report.config_diff import ConfigDifference
    from mega_agentrl.report.metrics_file import MetricLog
    from mega_agentrl.report.page.chart_groups import ChartGroup
    from mega_agentrl.report.run_start import RunStart
    from mega_agentrl.report.tree_viewer.embedded_trees import TreeFileView

STYLE_FILES = ("page.css", "viewer.css")
SCRIPT_FILES = ("dom.js", "charts.js", "tree.js", "conversation.js", "viewer.js")
_LEADING_GROUP = "Learning"


@dataclass(slots=True, kw_only=True, frozen=True)
class ReportPage:
    """Content of the page."""

    title: str
    subtitle: str
    """Line below the title."""
    log: MetricLog
    """Metrics of the run."""
    config_differences: Sequence[ConfigDifference] = ()
    """Settings that differ from the defaults."""
    starts: Sequence[RunStart] = ()
    """Starts of the run; the page shows the last one."""
    tree_files: Sequence[TreeFileView] = ()
    """Rollout trees by file."""
    max_colour_entropy: float = 1.0
    """Entropy in nats at which the colour scale of tokens ends."""
    notes: Sequence[str] = field(default_factory=tuple)
    """Sentences about missing content."""
    failure: str = ""
    """Why the run has failed; empty if it has not."""


@dataclass(slots=True, kw_only=True, frozen=True)
class _Section:
    anchor: str
    title: str
    body: Markup
    is_table: bool = False


def render_page(page: ReportPage) -> str:
    """Return the page as text without lone surrogates."""
    chart_blocks: list[Markup] = []
    sections = _sections(page, chart_blocks)
    style = "\n".join(_read_asset(name) for name in STYLE_FILES)
    script = (
        '(() => {\n"use strict";\n'
        + "\n".join(_read_asset(name) for name in SCRIPT_FILES)
        + "})();"
    )
    rendered = render_template(
        "page.html",
        page=page,
        policy=_content_security_policy(style, script),
        style=Markup(style),
        script=Markup(script),
        failures=[*([page.failure] if page.failure else []), *failure_lines(page.log)],
        tiles=render_tiles(summary_tiles(page.log)),
        sections=sections,
        chart_blocks=chart_blocks,
        trees=render_embedded_trees(page.tree_files, page.max_colour_entropy),
    )
    return str(rendered)


def _sections(page: ReportPage, chart_blocks: list[Markup]) -> list[_Section]:
    """Return the sections in order; adds the data of the charts to `chart_blocks`."""
    groups = {group.title: group for group in chart_groups(page.log)}
    sections = []
    if _LEADING_GROUP in groups:
        sections.append(_chart_section(groups.pop(_LEADING_GROUP), chart_blocks))
    validation_lines = page.log.validation_lines()
    if validation_lines:
        sections.append(
            _table_section("held-out-numbers", "Held out", validation_table(validation_lines))
        )
    if any(file.trees for file in page.tree_files):
        sections.append(
            _Section(anchor="rollouts", title="Rollout trees", body=render_template("viewer.html"))
        )
    if rows := tool_rows(page.log):
        sections.append(_table_section("tool-outcomes", "Tool outcomes", tool_table(rows)))
    sections += [_chart_section(group, chart_blocks) for group in groups.values()]
    if page.starts:
        facts = {**page.starts[-1].facts(), "number of starts": str(len(page.starts))}
        table = render_template("start_table.html", facts=facts)
        sections.append(_table_section("start", "What ran", table))
    if page.config_differences:
        sections.append(
            _table_section(
                "settings",
                "Settings",
                render_template("settings_table.html", differences=page.config_differences),
            )
        )
    return sections


def _chart_section(group: ChartGroup, chart_blocks: list[Markup]) -> _Section:
    figures = []
    for chart in group.charts:
        data_id = f"chart-{len(chart_blocks)}"
        chart_blocks.append(json_script_element(data_id, json_for_script(chart_data(chart))))
        figures.append(render_figure(chart, data_id))
    slug = "".join(char if char.isalnum() else "-" for char in group.title.lower())
    return _Section(
        anchor=f"charts-{slug}",
        title=group.title,
        body=render_template("charts.html", group=group, figures=figures),
    )


def _table_section(anchor: str, title: str, table: Markup) -> _Section:
    return _Section(anchor=anchor, title=title, body=table, is_table=True)


def _read_asset(name: str) -> str:
    return files("mega_agentrl.report").joinpath("assets", name).read_text(encoding="utf-8")


def _content_security_policy(style: str, script: str) -> str:
    """Return a policy that allows only the inline style, script and images of the page."""
    return (
        f"default-src 'none'; style-src {_csp_hash(style)}; script-src {_csp_hash(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _csp_hash(inline: str) -> str:
    digest = hashlib.sha256(inline.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
