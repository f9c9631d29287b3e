"""The page: read by a parser, and opened from disk in a browser.

The browser's tests are skipped where Debian's Chromium is not installed.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import replace

import pytest

from mega_agentrl.report.metrics_file import MetricLog
from mega_agentrl.report.page.render import ReportPage, render_page
from mega_agentrl.report.tree_viewer.embedded_trees import TreeFileView, embed_tree
from mega_agentrl.report.tree_viewer.tree_json import tree_to_json
from mega_agentrl.types.images import ImageInput
from tests.report.chromium import Chromium, needs_browser
from tests.report.pages import (
    HOSTILE,
    PageReader,
    characters,
    large_page,
    metrics,
    small_page,
    tree_with_images,
)
from tests.vision_models import make_picture


@pytest.fixture(scope="module")
def markup():
    return render_page(small_page())


@pytest.fixture(scope="module")
def read(markup):
    return PageReader(markup)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def address(markup, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(markup, encoding="utf-8")
    return path.as_uri()


def test_hostile_text_makes_no_element(read):
    kinds = [attributes.get("type", "") for attributes in read.all("script")]
    assert kinds.count("") == 1 and set(kinds) == {"", "application/json"}
    assert not read.all("img") and not read.all("iframe") and not read.all("base")
    assert all(link["href"].startswith("#") for link in read.all("a"))
    names = {name for _, attributes in read.elements for name in attributes}
    assert not [name for name in names if name.startswith("on")] and "style" not in names


def test_the_page_loads_nothing(read):
    assert not read.all("link")
    names = {name for _, attributes in read.elements for name in attributes}
    assert not names & {"src", "data", "poster", "srcset", "action", "formaction", "background"}


def test_the_content_policy_allows_this_script_and_style_alone(read):
    (policy,) = [
        one["content"] for one in read.all("meta") if "content" in one and "http-equiv" in one
    ]
    inline = ["".join(text) for attributes, text in read.inline if "type" not in attributes]
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in inline
    ]
    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src {hashes[0]}",
        f"script-src {hashes[1]}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def test_the_data_blocks_hold_the_trees_and_charts(read):
    blocks = read.data_blocks()
    assert blocks["tree-0"]["paths"][1]["name"] == "0.0"
    assert blocks["tree-2"]["id"] == HOSTILE
    assert blocks["tree-2"]["paths"][0]["turns"][0]["h"] == "NaN"
    assert [file["total"] for file in blocks["tree-index"]["files"]] == [5, 2]
    first_series = [one["series"][0]["name"] for one in blocks.values() if "series" in one]
    assert "logp_max_abs" in first_series


def test_the_page_is_text_and_has_its_parts(markup):
    markup.encode("utf-8")
    for part in ("held-out", "tools", "differences", "rollouts"):
        assert f'id="{part}"' in markup
    assert "0.25 → " in markup and "75.0%" in markup
    assert "$" not in markup.replace("${", "")


def test_a_run_without_output_has_a_page():
    read = PageReader(render_page(ReportPage(title="empty", subtitle="", log=MetricLog())))
    assert not [one for one in read.all("section") if one]


@pytest.mark.extended
@needs_browser
def test_the_page_opens_from_disk_without_an_error(browser, address):
    browser.open(address)
    assert browser.errors == []
    assert browser.requests() == [address]
    assert browser.run("globalThis.owned === undefined && document.title !== 'owned'")


@pytest.mark.extended
@needs_browser
def test_branches_are_drawn_where_they_happened(browser, address):
    browser.open(f"{address}#step=step_000001&tree=3&path=0.0.0")
    count = "document.querySelectorAll({}).length".format
    assert browser.run(count("'.tree .path'")) == 4
    assert browser.run(count("'.tree .branch'")) == 3
    assert browser.run(count("'.tree .answered'")) == 3
    assert browser.run(count("'.tree .asked.yes'")) == 3
    assert browser.run("document.querySelector('.path.chosen').dataset.path") == "0.0.0"
    # A fork's line leaves its parent's lane at its token: the knot is where the answer ends.
    knot, answer = browser.run(
        "[document.querySelector('[data-fork=\"0.0\"] .knot').getBBox(),"
        "document.querySelector('[data-path=\"0\"] .answered rect').getBBox()]"
        ".map((box) => [box.x + box.width / 2, box.x + box.width])"
    )
    assert knot[0] == pytest.approx(answer[1], abs=1.5)
    assert "RL step 1" in browser.run("document.getElementById('tree-title').textContent")
    assert browser.errors == []


@needs_browser
def test_a_click_on_a_leaf_opens_its_conversation(browser, address):
    browser.open(f"{address}#step=step_000001&tree=3")
    said = "document.querySelector('.conversation').textContent"
    assert "Conversation of path 0" in browser.run(said)
    browser.click('[data-path="0.1"] .leafend')
    words = browser.run(said)
    assert "Conversation of path 0.1" in words
    assert "path 0.1 leaves 0 here, at token 101" in words
    assert "branch? ΔH +1, P 0.7, τ 0.5: yes" in words
    facts = browser.run("document.querySelector('.facts').textContent")
    assert "advantage+0.5" in facts and "token 101 of 0" in facts
    assert browser.run("location.hash") == "#step=step_000001&tree=3&path=0.1"
    assert browser.errors == []


@pytest.mark.extended
@needs_browser
def test_the_pointer_shows_values_of_tokens_and_charts(browser, address):
    browser.open(f"{address}#step=step_000001&tree=3")
    browser.click('[data-path="0"] .said', share=0.02)
    tip = "document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent"
    assert browser.run(tip).startswith("t") and "entropy1 nats" in browser.run(tip)
    browser.click("figure[data-chart] .plot")
    assert browser.run(tip).startswith("step ")
    assert browser.errors == []


@pytest.mark.extended
@needs_browser
def test_hostile_text_is_shown_as_text(browser, address):
    browser.open(f"{address}#step=step_000008&tree=1")
    assert "<img src=x" in browser.run("document.getElementById('tree-title').textContent")
    browser.click('[data-path="0.0"] .leafend')
    browser.run("document.getElementById('zoom-in').click()")
    active = "img, iframe, .conversation a, .conversation script"
    assert browser.run(f"document.querySelectorAll('{active}').length") == 0
    assert browser.run("globalThis.owned === undefined")
    assert not browser.run(r"/[\0\u202e]/.test(document.body.innerText)")
    assert browser.errors == []


@pytest.mark.extended
@needs_browser
def test_a_path_shows_the_images_of_its_question_and_answers(browser, tmp_path):
    image = ImageInput(
        image_id="shown",
        data=make_picture(0),
        width=56,
        height=28,
        grid_thw=(1, 2, 4),
        merge_size=2,
    )
    broken = replace(image, image_id="broken", data=b"<svg onload='globalThis.owned=1'>")
    view = tree_to_json(tree_with_images(image, broken), characters)
    view["images"].append({"label": HOSTILE, "src": f"data:image/svg+xml,{HOSTILE}"})
    view["question"][0]["images"].append(2)
    trees = [embed_tree(0, view)]
    file = TreeFileView(key="step_000001", label="RL step 1", num_trees=1, trees=trees)
    page = ReportPage(title="images", subtitle="", log=metrics(), tree_files=[file])
    path = tmp_path / "images.html"
    path.write_text(render_page(page), encoding="utf-8")
    browser.open(path.as_uri())
    (width,) = browser.run(
        "[...document.querySelectorAll('.conversation img')].map((image) => image.naturalWidth)"
    )
    assert width == 56
    labels = "[...document.querySelectorAll('.conversation figcaption')].map((x) => x.textContent)"
    size = "56 x 28 pixels, 2 tokens"
    first, hostile, answer = browser.run(labels)
    assert (first, answer) == (size, size) and "onerror" in hostile
    assert browser.run("globalThis.owned === undefined")
    assert browser.errors == []


@pytest.mark.extended
@needs_browser
def test_a_tree_without_a_tokenizer_is_drawn(browser, address):
    browser.open(f"{address}#step=step_000008&tree=0")
    assert browser.run("document.querySelectorAll('.tree .path').length") == 4
    assert "thinkhard<search>q1</search>" in browser.run(
        "document.querySelector('.conversation').textContent"
    )
    assert browser.errors == []


@pytest.mark.extended
@needs_browser
def test_prompts_can_be_found_and_steps_chosen(browser, address):
    browser.open(address)
    browser.run(
        "(() => { const step = document.getElementById('step'); step.value = 'step_000001';"
        "step.dispatchEvent(new Event('change')); })()"
    )
    assert "1 of 5 prompts" in browser.run("document.getElementById('left-out').textContent")
    listed = "document.querySelectorAll('#prompts li').length"
    assert browser.run(listed) == 1
    browser.run(
        "(() => { const find = document.getElementById('find'); find.value = 'nothing';"
        "find.dispatchEvent(new Event('input')); })()"
    )
    assert browser.run(listed) == 0
    assert browser.errors == []


@pytest.mark.extended
@needs_browser
def test_five_thousand_trajectories_open(browser, tmp_path, record_property):
    path = tmp_path / "large.html"
    path.write_text(render_page(large_page(1250)), encoding="utf-8")
    took_s = browser.open(path.as_uri())
    assert browser.run("document.querySelectorAll('.tree .path').length") == 4
    assert browser.run("document.querySelectorAll('#prompts li').length") == 1250
    record_property("opened_s", took_s)
    assert browser.errors == []
