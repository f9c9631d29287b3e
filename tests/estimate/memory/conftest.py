"""Tiny models for the tests of memory estimates."""

from functools import cache

import pytest

from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folders(request, tmp_path_factory):
    """`folders(name)`: the folder of the model `name` in `MODELS` of the test's module."""

    @cache
    def folder(name):
        architecture, changes = request.module.MODELS[name]
        return make_tiny_model(architecture, tmp_path_factory.mktemp("model"), **changes)

    return folder
