"""Work on the CPU cut into pieces: the bits are those of the whole, dropout's mask included."""

import functools
from itertools import product

import pytest
import torch
from fusednorm.cpu import batch_invariant, chunks, dropout_mask
from fusednorm.cpu.batch_invariant import row_norms
from fusednorm.reference.dropout import compute_dropout_mask, compute_philox_words

from tests.sampling import mark_rest_slow

DTYPES = (torch.float32, torch.float16)
# In pieces of 48 elements: several rows or samples, some groups of a sample, a row or a group that is longer.
ROWS = [(100, 1), (7, 24), (5, 48), (3, 131)]
SAMPLES = [(50, 2, 1), (5, 8, 3), (3, 8, 6, 5), (2, 2, 67)]
CUTS = [
    *[(op, shape, False) for op in ("layer_norm", "rms_norm") for shape in ROWS],
    *[("group_norm", shape, last) for shape in SAMPLES for last in (False, True)],
]
# Sums over rows or samples, which are taken piece by piece.
SUMS = ("dweight", "dbias")


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    torch.manual_seed(11)
    monkeypatch.setattr(row_norms, "WHOLE_ELEMENTS", 0)
    monkeypatch.setattr(dropout_mask, "_QUADS", 7)
    # With weights torch's backward of GroupNorm rounds otherwise on another number of threads.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cut", "dtype", "p", "activation"), mark_rest_slow(product(CUTS, DTYPES, (0.0, 0.4), ("none", "gelu_tanh")))
)
def test_bits_are_those_of_the_whole(cut, dtype, p, activation, monkeypatch):
    op, shape, channels_last = cut

    def like_x() -> torch.Tensor:
        t = torch.randn(shape).to(dtype)
        return t.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else t

    x, dy, residual, outside = like_x(), like_x(), like_x(), like_x()
    size = shape[1]
    options = {"activation": activation, "dropout": p, "seed": 3, "eps": 1e-3, "weight": torch.randn(size)}
    if op != "rms_norm":
        options["bias"] = torch.randn(size).half()
    if op == "group_norm":
        options |= {"scale": torch.randn(shape[:2]), "shift": torch.randn(shape[:2])}
    groups = [2] if op == "group_norm" else []
    forward = functools.partial(getattr(batch_invariant, f"{op}_forward"), x, *groups, stats=True, **options)
    backward = functools.partial(getattr(batch_invariant, f"{op}_backward"), dy, x, *groups, **options)
    calls = [
        forward,
        functools.partial(forward, residual=residual, out_dtype=torch.float32),
        backward,
        functools.partial(backward, residual=residual, dresidual_out=outside),
    ]
    for call in calls:
        results = {}
        for elements in (48, 2**30):
            monkeypatch.setattr(chunks, "PIECE_ELEMENTS", elements)
            results[elements] = call()
        for name, whole in results[2**30]._asdict().items():
            cut = getattr(results[48], name)
            assert (cut is None) == (whole is None)
            if whole is None:
                continue
            assert cut.stride() == whole.stride()
            if name in SUMS:
                torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-3)
            else:
                assert torch.equal(cut, whole), name


def test_mask_of_any_piece_is_that_of_the_whole():
    for seed in (0, -3, 2**63 - 1):
        for count, positions in ((1, 37), (9, 1), (9, 4), (5, 6)):
            whole = compute_dropout_mask(seed, count, positions, 0.3, "cpu")
            for row in range(count):
                for start in range(positions):
                    kept = dropout_mask.DropoutMask(0.3, seed).compute(range(row, count), range(start, positions))
                    assert torch.equal(kept, whole[row:, start:])
                    kept = dropout_mask.DropoutMask(0.3, seed).compute(range(row, row + 1), range(start, start + 1))
                    assert torch.equal(kept, whole[row : row + 1, start : start + 1])


def test_mask_of_rows_beyond_32_bits():
    quad = torch.arange(2)[None, :]
    row = torch.tensor([[2**32 + 5]])
    words = torch.stack(compute_philox_words(9, row, quad), dim=-1).view(1, -1)
    kept = dropout_mask.DropoutMask(0.5, 9).compute(range(2**32 + 5, 2**32 + 6), range(7))
    assert torch.equal(kept, words[:, :7] >= 2**31)


@pytest.mark.parametrize(
    ("samples", "groups", "elements"), [(5, 4, 3), (3, 4, 48), (2, 3, 100), (1, 1, 1), (50, 2, 1)]
)
def test_every_group_is_in_one_piece(samples, groups, elements, monkeypatch):
    monkeypatch.setattr(chunks, "PIECE_ELEMENTS", 48)
    seen = []
    for of_samples, of_groups in chunks.split_groups(samples, groups, elements):
        count = (of_samples.stop - of_samples.start) * (of_groups.stop - of_groups.start)
        assert count == 1 or count * elements <= 48
        seen += [(s, g) for s in range(samples)[of_samples] for g in range(groups)[of_groups]]
    assert seen == [(s, g) for s in range(samples) for g in range(groups)]
