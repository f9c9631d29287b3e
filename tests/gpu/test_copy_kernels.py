"""The kernel that copies and digests weights on a GPU, against the digests of a CPU."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.verify.copy_table import CopyTable, MatrixCopy
from mega_agentrl.reshard.verify.digest import compute_digests
from tests.reshard.verify.copy_cases import GPU_CHECKS, random_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("check", GPU_CHECKS, ids=lambda check: check.__name__)
def test_digests_on_a_gpu_are_those_of_a_cpu(check):
    pytest.importorskip("triton")
    check("cuda")


@pytest.mark.parametrize("columns", [4096, 4097])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_whole_bucket_is_copied(dtype, columns):
    """One matrix of 32 to 64 MiB, that all programs of the grid share."""
    pytest.importorskip("triton")
    values = random_bits(4096, columns, dtype, seed=1)
    source, target = values.cuda(), torch.zeros_like(values, device="cuda")
    sum_D2 = torch.zeros(1, 2, dtype=torch.int32, device="cuda")
    rows = (0, columns, 4096, columns)
    copy = MatrixCopy(dtype.itemsize, 0, 0, columns, 1, *rows, 0, 0, 0)
    CopyTable([copy]).run([source, target], sum_D2)
    assert torch.equal(target.cpu().view(torch.int16), values.view(torch.int16))
    expected = compute_digests([(values, Rect.whole(tuple(values.shape)))])
    assert sum_D2.cpu().numpy().view(expected.dtype).tolist() == expected.tolist()
