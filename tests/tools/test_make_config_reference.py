"""The reference of the settings: every leaf is in it, and the page that is kept is current."""

import re

import pytest

from mega_agentrl.config.override_keys import known_keys
from tools.make_config_reference import main, reference

pytestmark = pytest.mark.extended


def test_every_setting_has_one_row():
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \|", reference(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(known_keys())


def test_the_page_in_docs_is_current(capsys):
    code = main(["--check"])
    assert code == 0, capsys.readouterr().err


def test_an_outdated_page_is_refused_with_its_difference(tmp_path, capsys):
    page = tmp_path / "page.md"
    assert main(["--out", str(page)]) == 0
    assert main(["--out", str(page), "--check"]) == 0
    page.write_text(page.read_text().replace("`optim.lr`", "`optim.rate`"))
    assert main(["--out", str(page), "--check"]) == 1
    assert "+| `optim.lr` |" in capsys.readouterr().err
