"""Chunks that loops carry from turn to turn, as 32-bit words: 16-bit values would take a register each."""

import triton
import triton.language as tl


@triton.jit
def load_words(
    ptr, at, length, wanted, i: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    """Chunk i of BLOCK elements from ptr + at on as words [lanes, 4]; 0 past `length` and unless `wanted`.

    The elements start and end at multiples of 16 bytes.
    """
    EACH: tl.constexpr = 32 // ptr.dtype.element_ty.primitive_bitwidth
    word = tl.arange(0, BLOCK // GROUP)[:, None] * 4 + tl.arange(0, 4)[None, :]
    mask = tl.full(word.shape, True, tl.int1) & wanted
    if i >= FULL:
        mask = mask & (word + i * (BLOCK // EACH) < length // EACH)
    word_ptr = (ptr + at + i * BLOCK).to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.load(word_ptr + word, mask=mask, other=0)


@triton.jit
def widened_words(words, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """The elements of words [lanes, 4] in float32, [lanes, 4] or [lanes, 8].

    FAST may not be done once for two uses: what is kept would be wider than the words.
    """
    if DTYPE.primitive_bitwidth == 32:
        return words.to(DTYPE, bitcast=True)
    else:
        if FAST and tl.bfloat16 == DTYPE:
            low, high = tl.inline_asm_elementwise(
                "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
                "=r,=r,r",
                [words],
                dtype=(tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
        elif FAST:
            low, high = tl.inline_asm_elementwise(
                "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
                "=f,=f,r",
                [words],
                dtype=(tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
        else:
            low = words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
            high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(low, high), (words.shape[0], 8))
