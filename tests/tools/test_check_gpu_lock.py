"""`tools/check_gpu_lock.py` compares the pins of the GPU environment with each other."""

import pytest

from tools.check_gpu_lock import PYTHONS, Package, find_conflicts, main

pytestmark = pytest.mark.extended

VLLM = Package(
    version="0.32.0",
    requires=[
        'setuptools<81.0.0,>=77.0.3; python_version > "3.11"',
        'winloop>=0.1; sys_platform == "win32"',
        'plotly; extra == "bench"',
        "mistral-common[image]>=1.13",
    ],
)
MISTRAL = Package(version="1.13.1", requires=['opencv>=4; extra == "image"', "NumPy>=1.25"])
NUMPY = Package(version="2.3.5", requires_python=">=3.11")


def pinned(**changes):
    packages = {
        "vllm": VLLM,
        "mistral-common": MISTRAL,
        "numpy": NUMPY,
        "opencv": Package(version="5.0.0"),
        "setuptools": Package(version="78.1.1"),
    }
    return {name: package for name, package in (packages | changes).items() if package is not None}


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_pins_that_fit_each_other_have_no_conflicts(python):
    assert find_conflicts(pinned(), ["vllm==0.32.0"], python) == []


def test_requirement_counts_only_for_the_python_of_its_marker():
    packages = pinned(setuptools=Package(version="84.2.1"))
    assert find_conflicts(packages, ["vllm"], "3.11") == []
    (conflict,) = find_conflicts(packages, ["vllm"], "3.12")
    assert conflict.startswith("vllm 0.32.0 needs setuptools<81.0.0,>=77.0.3")
    assert conflict.endswith("the pin is 84.2.1")


def test_requirements_of_requested_extras_are_followed():
    without = pinned(opencv=None)
    (conflict,) = find_conflicts(without, ["vllm"], "3.11")
    assert conflict.startswith("mistral-common 1.13.1 needs opencv>=4")
    assert conflict.endswith("not pinned")
    assert find_conflicts(without, ["mistral-common"], "3.11") == []
    # The extra is also found where the package was already required without it.
    assert find_conflicts(without, ["mistral-common", "vllm"], "3.11") == [conflict]
    assert find_conflicts(without, ["vllm", "mistral-common"], "3.11") == [conflict]


def test_the_project_and_the_version_of_python_count_as_requirements():
    packages = pinned(numpy=Package(version="2.3.5", requires_python=">=3.12"))
    assert find_conflicts(packages, ["numpy==2.4.0"], "3.11") == [
        "numpy 2.3.5 needs Python >=3.12",
        "the project needs numpy==2.4.0, but the pin is 2.3.5",
    ]


@pytest.mark.slow(90)
@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_fits_both_versions_of_python(python, capfd):
    code = main(["--python", python])
    output = capfd.readouterr()
    if code == 2 and "No matching distribution" not in output.err:
        pytest.skip(f"pip cannot ask the package index: {output.err[-300:]}")
    assert code == 0, output.out + output.err
