"""Slabs under any sequence of loans, of views that outlive them, and of returns."""

import itertools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from normserve.memory.slabs import PLAIN, SlabAllocator, SlabPool, allocate_plain

KIB = 1024
MAX_IDLE_BYTES = 600 * KIB
SIZES = st.sampled_from([0, 1, 64 * KIB, 64 * KIB + 1, 100 * KIB, 128 * KIB, 200 * KIB, 700 * KIB])


class Loan:
    """A slab that was filled with a number of its own, and the views that are left of it."""

    def __init__(self, slab: memoryview, number: int) -> None:
        slab[:] = bytes([number]) * len(slab)
        self.number, self.nbytes = number, len(slab)
        array = np.frombuffer(slab, np.uint8)
        self.start = array.ctypes.data if len(array) else 0
        self.views = [slab]


class Lending(RuleBasedStateMachine):
    """One pool and everything that it has lent."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlabPool(max_idle_bytes=MAX_IDLE_BYTES)
        self.pool.source = SlabAllocator(self.allocate, sizes_per_doubling=PLAIN.sizes_per_doubling, is_slow=False)
        self.loans: list[Loan] = []
        self.is_exhausted = False
        self.numbers = 0

    def allocate(self, nbytes: int):
        if self.is_exhausted:
            raise MemoryError
        return allocate_plain(nbytes)

    def lend(self, slab: memoryview, nbytes: int) -> None:
        assert nbytes <= len(slab) <= max(64 * KIB, nbytes * 5 // 4)
        self.numbers = self.numbers % 255 + 1
        self.loans.append(Loan(slab, self.numbers))

    @rule(nbytes=SIZES)
    def take(self, nbytes):
        self.lend(self.pool.borrow(nbytes), nbytes)

    @rule(nbytes=SIZES)
    def take_idle(self, nbytes):
        idle = self.pool.idle_bytes
        slab = self.pool.borrow_idle(nbytes)
        if slab is not None:
            assert self.pool.idle_bytes == idle - len(slab)
            self.lend(slab, nbytes)

    @rule(nbytes=SIZES)
    def take_while_there_is_no_memory(self, nbytes):
        used = self.pool.used_bytes
        self.is_exhausted = True
        try:
            self.lend(self.pool.borrow(nbytes), nbytes)
        except MemoryError:
            assert self.pool.used_bytes == used
        finally:
            self.is_exhausted = False

    @precondition(lambda self: self.loans)
    @rule(data=st.data(), keeps_a_part=st.booleans())
    def give_back(self, data, keeps_a_part):
        loan = self.loans[data.draw(st.integers(0, len(self.loans) - 1))]
        if keeps_a_part and loan.nbytes > 10:
            loan.views = [loan.views[0][1:9]]
            return
        self.loans.remove(loan)

    @invariant()
    def nobody_writes_to_what_another_has(self):
        assert all(set(view) <= {loan.number} for loan in self.loans for view in (each[:16] for each in loan.views))
        ends = sorted((loan.start, loan.start + loan.nbytes) for loan in self.loans)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))

    @invariant()
    def bytes_are_counted_while_a_view_is_left(self):
        assert self.pool.used_bytes == sum(loan.nbytes for loan in self.loans)

    @invariant()
    def no_more_than_allowed_lies_idle(self):
        assert 0 <= self.pool.idle_bytes <= MAX_IDLE_BYTES


Lending.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
TestLending = Lending.TestCase
