"""The smoke run's input in small, shared by all tests that need a model and data."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
    """A small tool-QA: model, data and corpus."""
    folder = tmp_path_factory.mktemp("toolqa")
    sizes = ("--num-train", "200", "--num-dev", "30", "--num-validation", "30")
    script = ROOT / "tools" / "make_tiny_model.py"
    subprocess.run(
        [sys.executable, str(script), "--out", str(folder), "--num-demonstrations", "400", *sizes],
        check=True,
        timeout=180,
        capture_output=True,
    )
    return folder
