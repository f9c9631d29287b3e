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


def classes():
    """All classes of the package's modules that are named after a protocol."""
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for name, found in inspect.getmembers(module, inspect.isclass):
            if found.__module__ == module.__name__ and module is not base:
                for protocol in PROTOCOLS:
                    if name.endswith(protocol.__name__):
                        yield pytest.param(found, protocol, id=f"{info.name}.{name}")


ALL = list(classes())


def parameters(method):
    return [(p.name, p.kind, p.annotation) for p in inspect.signature(method).parameters.values()]


def test_the_interface_is_small():
    names = {protocol.__name__: set(methods_of(protocol)) for protocol in PROTOCOLS}
    assert names == {
        "SendHandle": {"wait"},
        "RecvHandle": {"wait", "release"},
        "Transport": {"allocate_slots", "send", "receive", "close"},
    }


def test_gloo_is_among_the_transports():
    from mega_agentrl.reshard.transports.gloo import GlooRecvHandle, GlooSendHandle, GlooTransport

    found = [case.values for case in ALL]
    for case in (
        (GlooTransport, Transport),
        (GlooRecvHandle, RecvHandle),
        (GlooSendHandle, SendHandle),
    ):
        assert case in found


@pytest.mark.parametrize(("found", "protocol"), ALL)
def test_signatures_are_those_of_the_interface(found, protocol):
    for name, expected in methods_of(protocol).items():
        method = getattr(found, name, None)
        assert method is not None, f"{found.__name__} has no {name}"
        assert parameters(method) == parameters(expected), f"{found.__name__}.{name}"


@pytest.mark.parametrize(("found", "protocol"), [c for c in ALL if c.values[1] is Transport])
def test_a_transport_says_whether_it_needs_exact_slots(found, protocol):
    assert "self.needs_exact_size" in inspect.getsource(found) or isinstance(
        inspect.getattr_static(found, "needs_exact_size", None), bool | property
    )
