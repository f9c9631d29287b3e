"""Views against rectangles by property; what a loader may do and what is refused, by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.errors import InputError
from mega_agentrl.generator.weights.load_recorder import LoadRecorder, view_rect
from mega_agentrl.reshard.layout import Block, Rect


def record(loader, source=(4, 6), param=(4, 6)):
    weight = torch.empty(source, device="meta")
    parameter = torch.zeros(param)
    with LoadRecorder({"w": weight}, {"p": parameter}) as recorder:
        loader(parameter, weight)
    return recorder.param_loads["p"]


def test_slices_chunks_and_reshapes_are_followed():
    def loader(parameter, weight):
        upper = weight.view(24).view(2, 12).chunk(2)[1].reshape(2, 6)
        parameter.narrow(0, 1, 2).detach()[:, 3:].copy_(upper.narrow(1, 2, 3))

    expected = Block("w", Rect((2, 2), (4, 5)), Rect((1, 3), (3, 6)))
    assert record(loader).blocks == [expected]


def test_a_slice_of_a_stack_and_one_row_are_rectangles_of_another_rank():
    blocks = record(lambda p, w: p[1].copy_(w), param=(3, 4, 6)).blocks
    assert blocks == [Block("w", Rect.whole((4, 6)), Rect((1, 0, 0), (2, 4, 6)))]
    blocks = record(lambda p, w: p.copy_(w[2]), param=(6,)).blocks
    assert blocks == [Block("w", Rect((2, 0), (3, 6)), Rect.whole((6,)))]


def test_zeros_are_padding_and_nothing_is_executed():
    parameter = torch.ones(4, 6)
    weight = torch.empty(3, 6, device="meta")
    with LoadRecorder({"w": weight}, {"p": parameter}) as recorder:
        parameter[:3].data.copy_(weight)
        parameter[3:].data.fill_(0)
        parameter[4:].data.fill_(0)
    assert recorder.param_loads["p"].zero_rects == [Rect((3, 0), (4, 6))]
    assert torch.equal(parameter, torch.ones(4, 6))


def test_other_tensors_are_left_alone():
    with LoadRecorder({}, {}) as recorder:
        assert (torch.ones(2) + 1).tolist() == [2, 2]
    assert recorder.param_loads == {}


@pytest.mark.parametrize(
    ("loader", "name", "got"),
    [
        (lambda p, w: p.copy_(w + 1), "w", "aten.add.Tensor"),
        (lambda p, w: p.copy_(w.to(torch.float64)), "w", "aten._to_copy.default"),
        (lambda p, w: p.view(torch.int32).copy_(w), "p", "aten.view.dtype"),
        (lambda p, w: p.fill_(w[0, 0].item()), "w", "aten._local_scalar_dense.default"),
        (lambda p, w: p.add_(w), "p, w", "aten.add_.Tensor"),
        (lambda p, w: p.copy_(torch.ones(4, 6)), "p", "aten.copy_.default"),
        (lambda p, w: torch.empty_like(w).copy_(w), "w", "aten.empty_like.default"),
        (lambda p, w: p[:, :4].copy_(w[:, :4].t()), "w", "copied into p (4, 6)"),
        (lambda p, w: p.copy_(w[0]), "w", "copied into p (4, 6)"),
        (lambda p, w: p[:, ::2].copy_(w[:, :3]), "w", "copied into p (4, 6)"),
        (lambda p, w: p.fill_(1), "p", "fills with 1"),
        (lambda p, w: [p.copy_(w), p[1:2].zero_()], "p", "after w was copied"),
    ],
    ids=[
        *("computed", "converted", "reinterpreted", "item", "added-to", "foreign", "new-tensor"),
        *("transposed", "repeated", "interleaved", "constant", "cleared-afterwards"),
    ],
)
def test_an_operation_that_no_rectangle_describes_is_named(loader, name, got):
    with pytest.raises(InputError) as caught:
        record(loader)
    assert caught.value.name == name
    assert got in str(caught.value.got)


def test_a_parameter_in_another_order_is_refused():
    with pytest.raises(InputError) as caught:
        LoadRecorder({}, {"p": torch.zeros(3, 4).t()})
    assert caught.value.name == "p"


@st.composite
def views(draw):
    """A tensor whose values are its addresses, and some view of it."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    base = torch.arange(torch.Size(shape).numel()).view(shape)
    view = base
    for _ in range(draw(st.integers(0, 4))):
        dim = draw(st.integers(0, view.dim() - 1)) if view.dim() else 0
        step = draw(st.sampled_from(["narrow", "t", "flatten", "unsqueeze", "step", "select"]))
        if step == "narrow" and view.dim():
            start = draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, start, draw(st.integers(1, view.shape[dim] - start)))
        elif step == "t" and view.dim() > 1:
            view = view.transpose(0, dim)
        elif step == "flatten" and view.is_contiguous():
            view = view.view(-1)
        elif step == "unsqueeze":
            view = view.unsqueeze(dim)
        elif step == "step" and view.dim():
            view = view[::2]
        elif step == "select" and view.dim() > 1:
            view = view.select(dim, view.shape[dim] - 1)
    return shape, base, view


@settings(deadline=None, max_examples=300)
@given(views())
def test_a_view_is_a_rectangle_exactly_if_one_has_the_same_elements_in_order(case):
    shape, base, view = case
    wanted = view.flatten().tolist()
    places = [torch.unravel_index(torch.tensor(at), shape) for at in (min(wanted), max(wanted))]
    first, last = ([int(x) for x in place] for place in places)
    found = view_rect(shape, view)
    exists = all(a <= b for a, b in zip(first, last, strict=True))
    if exists:
        rect = Rect(tuple(first), tuple(b + 1 for b in last))
        exists = base[rect.slices].flatten().tolist() == wanted
        assert found == (rect if exists else None)
    assert (found is not None) == exists
