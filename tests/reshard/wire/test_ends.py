"""Every wire has what the interface asks for, by the same names, arguments and result types."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import mega_agentrl.reshard.wire as package
from mega_agentrl.reshard.wire import ends
from mega_agentrl.reshard.wire.ends import Arrival, Departure, Wire

ENDS = (Departure, Arrival, Wire)


def methods_of(protocol):
    return {
        name: method
        for name, method in vars(protocol).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }


def classes():
    """All classes of the package's modules that are named for an end of a wire."""
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for name, found in inspect.getmembers(module, inspect.isclass):
            if found.__module__ == module.__name__ and module is not ends:
                for protocol in ENDS:
                    if name.endswith(protocol.__name__):
                        yield pytest.param(found, protocol, id=f"{info.name}.{name}")


ALL = list(classes())


def parameters(method):
    return [(p.name, p.kind, p.annotation) for p in inspect.signature(method).parameters.values()]


def test_the_interface_is_small():
    names = {protocol.__name__: set(methods_of(protocol)) for protocol in ENDS}
    assert names == {
        "Departure": {"wait"},
        "Arrival": {"wait", "done"},
        "Wire": {"slots", "send", "receive", "close"},
    }


def test_gloo_is_among_the_wires():
    from mega_agentrl.reshard.wire.gloo import GlooArrival, GlooDeparture, GlooWire

    found = [case.values for case in ALL]
    for case in ((GlooWire, Wire), (GlooArrival, Arrival), (GlooDeparture, Departure)):
        assert case in found


@pytest.mark.parametrize(("found", "protocol"), ALL)
def test_signatures_are_those_of_the_interface(found, protocol):
    for name, wanted in methods_of(protocol).items():
        method = getattr(found, name, None)
        assert method is not None, f"{found.__name__} has no {name}"
        assert parameters(method) == parameters(wanted), f"{found.__name__}.{name}"


@pytest.mark.parametrize(("found", "protocol"), [c for c in ALL if c.values[1] is Wire])
def test_a_wire_says_whether_it_needs_exact_slots(found, protocol):
    assert "self.exact" in inspect.getsource(found) or isinstance(
        inspect.getattr_static(found, "exact", None), bool | property
    )
