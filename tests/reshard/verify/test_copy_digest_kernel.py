import numpy as np
import torch

from mega_agentrl.reshard.verify.copy_digest_kernel import CopyDigestKernel


def copy_and_weigh(to, words, columns, rows):
    """The digest, from 0."""
    sums = np.zeros(2, dtype=np.int32)
    CopyDigestKernel(columns, rows).copy(
        to.data_ptr(), to.stride(0), words.data_ptr(), words.stride(0), sums.ctypes.data
    )
    return sums


def test_rows_are_copied_and_weighed_by_hand():
    words = torch.tensor([[1, 2, 3], [-1, 0, 5]], dtype=torch.int32)
    to = torch.zeros(2, 3, dtype=torch.int32)
    columns = np.array([1, 3, 5], dtype=np.int32)
    rows = np.array([[7, 9], [1, -1]], dtype=np.int32)
    found = copy_and_weigh(to, words, columns, rows)
    # rows weigh 1 + 6 + 15 = 22 and -1 + 25 = 24
    assert found.tolist() == [7 * 22 + 9 * 24, 22 - 24]
    assert torch.equal(to, words)


def test_sums_wrap_at_32_bits_and_strides_do_not_matter():
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(-(2**31), 2**31 - 1, (9, 40), generator=generator, dtype=torch.int32)
    words, room = whole[1:8, 3:36], torch.full((9, 50), 77, dtype=torch.int32)
    columns, rows = whole[0, :33].numpy(), whole[:2, :7].contiguous().numpy()
    found = copy_and_weigh(room[2:9, 10:43], words, columns, rows)
    exact = words.numpy().astype(object) @ columns.astype(object)
    for k in range(2):
        assert int(found[k]) % 2**32 == int(rows[k].astype(object) @ exact) % 2**32
    assert torch.equal(room[2:9, 10:43], words)
    assert (room[:2] == 77).all() and (room[:, :10] == 77).all() and (room[:, 43:] == 77).all()
