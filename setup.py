"""Packaging steps that pyproject.toml cannot express.

Puts the top-level configs/ folder into the wheel as mega_agentrl/configs, and the assets of the
report page into their package. `mega_agentrl.config.paths.find_config_dir` finds either place.
"""

from __future__ import annotations

from setuptools import find_namespace_packages, find_packages, setup

groups = find_namespace_packages("configs")
configs = ["mega_agentrl.configs", *(f"mega_agentrl.configs.{group}" for group in groups)]

setup(
    packages=[*find_packages(include=["mega_agentrl", "mega_agentrl.*"]), *configs],
    package_dir={"mega_agentrl.configs": "configs"},
    package_data={
        "mega_agentrl.report": ["assets/*"],
        **{package: ["*.yaml"] for package in configs},
    },
)
