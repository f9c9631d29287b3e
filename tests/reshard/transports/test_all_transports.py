"""Every transport implements the interface with equal names, arguments and result types."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import mega_agentrl.reshard.transports as package
from mega_agentrl.reshard.transports import base
from mega_agentrl.reshard.transports.base import RecvHandle, SendHandle, Transport

PROTOCOLS = (SendHandle, RecvHandle, Transport)


def methods_of(protocol):
    return {
        name: method
        for name, method in vars(protocol).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }


def implementations():
    """All classes of the package's modules that are named after a protocol."""
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for name, found in inspect.getmembers(module, inspect.isclass):
            if found.__module__ == module.__name__ and module is not base:
                for protocol in PROTOCOLS:
                    if name.endswith(protocol.__name__):
                        yield pytest.param(found, protocol, id=f"{info.name}.{name}")


IMPLEMENTATIONS = list(implementations())


def parameters(method):
    return [(p.name, p.kind, p.annotation) for p in inspect.signature(method).parameters.values()]


def test_every_method_of_every_transport_is_found():
    assert {case.values[1] for case in IMPLEMENTATIONS} == set(PROTOCOLS)
    assert {name for protocol in PROTOCOLS for name in methods_of(protocol)} == {
        *("allocate_slots", "send", "receive", "wait", "release", "close")
    }


@pytest.mark.parametrize(("found", "protocol"), IMPLEMENTATIONS)
def test_signatures_are_those_of_the_interface(found, protocol):
    for name, expected in methods_of(protocol).items():
        method = getattr(found, name, None)
        assert method is not None, f"{found.__name__} has no {name}"
        assert parameters(method) == parameters(expected), f"{found.__name__}.{name}"
