"""The copies of a `CopyTable` on a GPU: one kernel launch, however many matrices there are.

A program takes every n-th block of the elements of one matrix, in row-major order, and adds to the
two sums once, when it is done. Words are read as such where all offsets allow it, otherwise 16-bit
elements; the kernel itself chooses, matrix by matrix. On a CPU it runs under Triton's interpreter
(TRITON_INTERPRET=1 before this module is imported), for tests without a GPU.

Shape suffixes: B elements of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from mega_agentrl.reshard.verify.copy_table import MatrixCopy
from mega_agentrl.reshard.verify.factors import column_factors, row_factors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.reshard.verify.copy_table import CopyTable

BLOCK = 2048
INTERPRETER_BLOCK = 32
"""Small, so that small matrices have several blocks."""
MAX_PROGRAMS_PER_MATRIX = 512
INTERPRETER_PROGRAMS = 2
NUM_WARPS = 8


def run_table(table: CopyTable, tensors: Sequence[torch.Tensor], sum_D2: torch.Tensor) -> None:
    """Run a table; the arguments are those of `CopyTable.run`."""
    device = sum_D2.device
    block, programs = BLOCK, MAX_PROGRAMS_PER_MATRIX
    if not sum_D2.is_cuda:
        block, programs = INTERPRETER_BLOCK, INTERPRETER_PROGRAMS
    # From pinned memory, so that the copy does not wait for the kernels before it.
    address_N = torch.tensor(
        [tensor.data_ptr() for tensor in tensors], dtype=torch.int64, pin_memory=sum_D2.is_cuda
    )
    row_factor_2R = row_factors(table.num_rows, device)
    grid = (len(table.copies), min(programs, triton.cdiv(table.max_numel, block)))
    with torch.cuda.device_of(sum_D2):  # type: ignore[no-untyped-call]
        _copy_kernel[grid](
            table.on_device(device),
            address_N.to(device, non_blocking=True),
            column_factors(table.num_columns, device),
            row_factor_2R,
            row_factor_2R.shape[1],
            sum_D2,
            FIELDS=len(MatrixCopy._fields),
            BLOCK=block,
            num_warps=NUM_WARPS,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _copy_kernel(
    copies_ptr: tl.tensor,
    address_ptr: tl.tensor,
    column_factor_ptr: tl.tensor,
    row_factor_ptr: tl.tensor,
    num_row_factors: tl.tensor,
    sums_ptr: tl.tensor,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy this program's blocks of one matrix, and add their digest."""
    copy_ptr = copies_ptr + tl.program_id(0) * FIELDS
    item_bytes = tl.load(copy_ptr)
    source = tl.load(address_ptr + tl.load(copy_ptr + 1))
    offset = tl.load(copy_ptr + 2)
    stride = tl.load(copy_ptr + 3)
    target_index = tl.load(copy_ptr + 4)
    has_target = target_index >= 0
    target = tl.load(address_ptr + tl.maximum(target_index, 0))
    to_offset = tl.load(copy_ptr + 5)
    to_stride = tl.load(copy_ptr + 6)
    num_rows = tl.load(copy_ptr + 7).to(tl.int32)
    num_columns = tl.load(copy_ptr + 8).to(tl.int32)
    first_column = tl.load(copy_ptr + 10).to(tl.int32)
    row_factor_ptr += tl.load(copy_ptr + 9)
    sums_ptr += 2 * tl.load(copy_ptr + 11)
    odd = offset | stride | to_offset | to_stride | num_columns | first_column
    misaligned = (source | target) & 3
    if (item_bytes == 2) & (((odd & 1) | misaligned) != 0):
        first, second = _copy_blocks(
            source.to(tl.pointer_type(tl.int16)) + offset,
            stride,
            target.to(tl.pointer_type(tl.int16)) + to_offset,
            to_stride,
            has_target,
            num_rows,
            num_columns,
            first_column,
            column_factor_ptr,
            row_factor_ptr,
            num_row_factors,
            True,
            BLOCK,
        )
    else:
        shift = (item_bytes == 2).to(tl.int32)
        first, second = _copy_blocks(
            source.to(tl.pointer_type(tl.int32)) + (offset >> shift),
            stride >> shift,
            target.to(tl.pointer_type(tl.int32)) + (to_offset >> shift),
            to_stride >> shift,
            has_target,
            num_rows,
            num_columns >> shift,
            first_column >> shift,
            column_factor_ptr,
            row_factor_ptr,
            num_row_factors,
            False,
            BLOCK,
        )
    tl.atomic_add(sums_ptr, first, sem="relaxed")
    tl.atomic_add(sums_ptr + 1, second, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _copy_blocks(
    source_ptr: tl.tensor,
    stride: tl.tensor,
    target_ptr: tl.tensor,
    to_stride: tl.tensor,
    has_target: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    first_column: tl.tensor,
    column_factor_ptr: tl.tensor,
    row_factor_ptr: tl.tensor,
    num_row_factors: tl.tensor,
    HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Copy words or 16-bit elements, and return the two sums modulo 2^32."""
    num_elements = num_rows * num_columns
    first_B = tl.zeros((BLOCK,), dtype=tl.int32)
    second_B = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(tl.program_id(1) * BLOCK, num_elements, tl.num_programs(1) * BLOCK):
        index_B = start + tl.arange(0, BLOCK)
        inside_B = index_B < num_elements
        row_B = index_B // num_columns
        column_B = index_B - row_B * num_columns
        element_B = tl.load(source_ptr + row_B * stride + column_B, mask=inside_B, other=0)
        if has_target:
            tl.store(target_ptr + row_B * to_stride + column_B, element_B, mask=inside_B)
        column_B += first_column
        if HALVES:
            # The low half is unsigned, the high half is shifted up.
            word_B = (element_B.to(tl.int32) & 0xFFFF) << (16 * (column_B & 1))
            column_B = column_B >> 1
        else:
            word_B = element_B
        factor_B = tl.load(column_factor_ptr + column_B, mask=inside_B, other=0)
        row_B = row_factor_ptr + row_B
        word_B *= factor_B
        first_B += word_B * tl.load(row_B, mask=inside_B, other=0)
        second_B += word_B * tl.load(row_B + num_row_factors, mask=inside_B, other=0)
    return tl.sum(first_B), tl.sum(second_B)
