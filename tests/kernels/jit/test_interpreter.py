"""The interpreter computes what a GPU does: inline assembly, and reductions by functions of kernels.

Each test compares with the same numbers in the interpreter and on a GPU.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from fusednorm.jit.approximations import (
    approximate_exp2,
    approximate_reciprocal,
    approximate_rsqrt,
    approximate_tanh,
)
from fusednorm.jit.loads import widen
from fusednorm.jit.program_exchange import collect_slots, load_first_tag, locate_slot, post_scalars
from fusednorm.jit.reductions import multiply_rounded, reduce_maximum, sum_pair, sum_pair_to_scalars
from fusednorm.jit.register_fragments import _standardise as standardised
from fusednorm.jit.register_fragments import reduce_lane_moments

from tests import inline_assembly

everywhere = pytest.mark.parametrize("where", ["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
only_interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU knows every instruction")

BLOCK = 1024
ROWS, COLS = tl.constexpr(16), tl.constexpr(32)
LANES = tl.constexpr(64)


@triton.jit
def _compute_kernel(result_ptr, a_ptr, b_ptr, c_ptr, d_ptr, STATEMENT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + at)
    if STATEMENT == "multiply":
        result = multiply_rounded(a, tl.load(b_ptr + at))
    elif STATEMENT == "widen":
        result = widen(a)
    elif STATEMENT == "reciprocal":
        result = approximate_reciprocal(a)
    elif STATEMENT == "reciprocal root":
        result = approximate_rsqrt(a)
    elif STATEMENT == "exp2":
        result = approximate_exp2(a)
    elif STATEMENT == "tanh":
        result = approximate_tanh(a)
    else:
        result = standardised(a, tl.load(b_ptr + at), tl.load(d_ptr + at), tl.load(c_ptr + at))
    tl.store(result_ptr + at, result)


def compute(device, statement, *operands):
    """The result of the device function that contains the statement."""
    operands = [operand.to(device) for operand in operands]
    result = torch.full(operands[0].shape, torch.nan, device=device)
    pointers = (*operands, *[operands[0]] * (4 - len(operands)))
    _compute_kernel[(result.numel() // BLOCK,)](result, *pointers, statement, BLOCK)
    return result.cpu()


def any_floats(count):
    """Numbers of every exponent, with infinities and NaN."""
    bits = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).to(torch.int32)
    special = torch.tensor([0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan, 2.0**-126, 2.0**-149])
    return torch.cat([special, bits.view(torch.float32)[len(special) :]])


def assert_same(result, expected, **tolerance):
    torch.testing.assert_close(result, torch.from_numpy(expected), equal_nan=True, **(tolerance or EXACT))


EXACT = {"rtol": 0, "atol": 0}


@everywhere
def test_products_are_rounded(where, device):
    a, b = any_floats(8 * BLOCK), any_floats(8 * BLOCK).flip(0)
    assert_same(compute(device, "multiply", a, b), inline_assembly.multiply(a.numpy(), b.numpy()))


@everywhere
def test_every_16_bit_number_is_widened(where, device):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    bfloat16, float16 = bits.view(torch.bfloat16), bits.view(torch.float16)
    expected = inline_assembly.widen_bfloat16(bits.numpy().view(np.uint16))
    assert_same(compute(device, "widen", bfloat16), expected)
    assert_same(compute(device, "widen", float16), inline_assembly.widen_float16(float16.numpy()))
    assert_same(bfloat16.float(), expected)


@everywhere
def test_reciprocals_differ_by_no_more_than_a_rounding_step(where, device):
    x = any_floats(8 * BLOCK)
    # A reciprocal next to the smallest normal number may or may not become 0.
    x[(x.abs() / 2.0**126 - 1).abs() < 1e-5] = 2.0
    result, expected = compute(device, "reciprocal", x), inline_assembly.reciprocal(x.numpy())
    assert_same(result, expected, rtol=1.5 * 2**-23, atol=0)
    assert_same(torch.signbit(result[:2]), np.array([False, True]))


@everywhere
def test_reciprocal_roots_have_their_stated_error(where, device):
    x = torch.cat([torch.rand(BLOCK) * 4, any_floats(7 * BLOCK)])
    expected = inline_assembly.reciprocal_root(x.numpy())
    assert_same(compute(device, "reciprocal root", x), expected, rtol=1.1 * 2**-22, atol=0)


@everywhere
def test_powers_of_two_have_their_stated_error(where, device):
    x = torch.cat([torch.linspace(-125, 127, 7 * BLOCK), any_floats(BLOCK)])
    # A power next to the smallest normal number may or may not become 0.
    x[(x + 126).abs() < 1e-3] = 2.0
    assert_same(compute(device, "exp2", x), inline_assembly.exp2(x.numpy()), rtol=1.5 * 2**-22, atol=0)


@everywhere
def test_the_tangent_has_its_stated_error(where, device):
    x = torch.cat([torch.linspace(-12, 12, 7 * BLOCK), any_floats(BLOCK)])
    expected = inline_assembly.tanh(x.numpy())
    assert_same(compute(device, "tanh", x), expected, rtol=1.01 * 2**-11, atol=2.0**-126)


@everywhere
def test_values_are_standardised_with_two_roundings(where, device):
    h, mean = torch.randn(8 * BLOCK) * 8 + 100, torch.randn(8 * BLOCK) + 100
    rstd, rest = torch.rand(8 * BLOCK) + 0.1, torch.randn(8 * BLOCK)
    rest[::2] = (h - mean)[::2] * rstd[::2]
    result = compute(device, "standardise", h, mean, rstd, rest)
    arrays = (h.numpy(), mean.numpy(), rstd.numpy(), -rest.numpy())
    assert_same(result, inline_assembly.standardise(*arrays))


def test_a_sum_is_rounded_once():
    # Half a step of the result, and a little more than float64 holds beside it.
    values = np.array(
        [[1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60], [3.0, 5.0, -(2.0**-70)], [1.5, 7.0, 0.25]], np.float32
    )
    values = np.concatenate([values, np.random.default_rng(1).standard_normal((200, 3), np.float32)])
    h, rstd, addend = values.T
    results = inline_assembly.standardise(h, np.zeros_like(h), rstd, addend)
    for result, (a, b, c) in zip(results, values, strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        neighbours = (np.nextafter(result, np.float32(side)) for side in (-np.inf, np.inf))
        distance = abs(Fraction(float(result)) - exact)
        assert all(distance <= abs(Fraction(float(other)) - exact) for other in neighbours)


@triton.jit
def _unknown_kernel(result_ptr):
    result = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip
    tl.store(result_ptr, result)


@only_interpreted
def test_unknown_assembly_is_refused(device):
    with pytest.raises(Exception, match=r"add one to tests/inline_assembly.py: mov.u32 \$0, %smid;"):
        _unknown_kernel[(1,)](torch.zeros(1, dtype=torch.int32, device=device))


@triton.jit
def _waiting_kernel(exchange_ptr, result_ptr, POSTS: tl.constexpr):
    program = tl.program_id(0)
    other = (program + 1) % tl.num_programs(0)
    tag = load_first_tag(exchange_ptr)
    if POSTS:
        a = program.to(tl.float32)
        post_scalars(locate_slot(exchange_ptr, 0, tag, program, tl.num_programs(0), 1), tag, a, a + 0.5, -a)
    slot = locate_slot(exchange_ptr, 0, tag, other, tl.num_programs(0), 1)
    a, b, c = collect_slots(slot + tl.zeros((1,), tl.int32), tag)
    tl.store(result_ptr + program, tl.sum(a + b + c))


def make_wait(device, posts, programs=5, **options):
    buffer = torch.zeros(2 + 4 * programs, dtype=torch.int64, device=device)
    result = torch.zeros(programs, device=device)
    _waiting_kernel[(programs,)](buffer, result, posts, **options)
    return result.tolist()


@everywhere
def test_programs_wait_for_later_ones(where, device):
    assert make_wait(device, True, launch_cooperative_grid=True) == [1.5, 2.5, 3.5, 4.5, 0.5]


@only_interpreted
def test_programs_that_wait_for_what_none_posts_are_an_error(device):
    with pytest.raises(Exception, match="5 of 5 programs wait for values that none posts"):
        make_wait(device, False, launch_cooperative_grid=True)


@only_interpreted
def test_programs_that_wait_need_a_cooperative_launch(device):
    with pytest.raises(Exception, match="only in a launch with launch_cooperative_grid=True"):
        make_wait(device, True)


@triton.jit
def _sums_kernel(a_ptr, b_ptr, result_ptr, AXIS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    a, b = sum_pair(tl.load(a_ptr + at), tl.load(b_ptr + at), AXIS)
    count: tl.constexpr = a.shape[0] * a.shape[1]
    place = tl.arange(0, count)
    tl.store(result_ptr + place, tl.reshape(a, (count,)))
    tl.store(result_ptr + COLS + place, tl.reshape(b, (count,)))
    flat = tl.arange(0, ROWS * COLS)
    total_a, total_b = sum_pair_to_scalars(tl.load(a_ptr + flat), tl.load(b_ptr + flat))
    tl.store(result_ptr + 2 * COLS, total_a)
    tl.store(result_ptr + 2 * COLS + 1, total_b)


@everywhere
@pytest.mark.parametrize("axis", [0, 1])
def test_sums_of_whole_numbers_are_exact(where, axis, device):
    a, b = torch.randint(-1000, 1000, (2, ROWS.value, COLS.value), device=device).float()
    result = torch.zeros(2 * COLS.value + 2, device=device)
    _sums_kernel[(1,)](a, b, result, axis)
    left = (COLS.value, ROWS.value)[axis]
    assert torch.equal(result[:left], a.sum(axis))
    assert torch.equal(result[COLS.value :][:left], b.sum(axis))
    assert result[-2:].tolist() == [a.sum(), b.sum()]


@triton.jit
def _maximum_kernel(a_ptr, result_ptr):
    row = tl.arange(0, ROWS)[:, None]
    a = tl.load(a_ptr + row * COLS + tl.arange(0, COLS)[None, :])
    tl.store(result_ptr + row, reduce_maximum(a, 1))


@everywhere
def test_the_largest_of_a_row_with_nan_is_nan(where, device):
    a = torch.randn(ROWS.value, COLS.value, device=device)
    a[3, 17] = torch.nan
    a[5, 0] = torch.inf
    result = torch.zeros(ROWS.value, 1, device=device)
    _maximum_kernel[(1,)](a, result)
    torch.testing.assert_close(result, a.amax(1, keepdim=True), **EXACT, equal_nan=True)


@triton.jit
def _moments_kernel(count_ptr, mean_ptr, shift_ptr, square_ptr, result_ptr, EVEN: tl.constexpr):
    lane = tl.arange(0, LANES)[:, None]
    count, mean, shift, square = (
        tl.load(count_ptr + lane), tl.load(mean_ptr + lane), tl.load(shift_ptr + lane), tl.load(square_ptr + lane)
    )  # fmt: skip
    mean, shift, square = reduce_lane_moments(count, mean, shift, square, EVEN)
    tl.store(result_ptr, mean + shift)
    tl.store(result_ptr + 1, square)


@everywhere
@pytest.mark.parametrize("even", [True, False])
def test_merged_moments_are_those_of_all_values(where, even, device):
    values = torch.randn(LANES.value, 4, dtype=torch.float64) + 3
    there = torch.ones_like(values, dtype=torch.bool)
    if not even:
        there[40:, 2:] = False
        there[50:] = False
    count = there.sum(1).double()
    means = torch.where(there, values, 0).sum(1) / count.clamp(min=1)
    squares = torch.where(there, values - means[:, None], 0).square().sum(1)
    near = means.float().double() + 0.125
    moments = [moment.float().to(device) for moment in (count, near, means - near, squares)]
    result = torch.zeros(2, device=device)
    _moments_kernel[(1,)](*moments, result, even)
    all_values = values[there]
    expected = torch.stack([all_values.mean(), (all_values - all_values.mean()).square().sum()]).float()
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-6, atol=1e-6)
