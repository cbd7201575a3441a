"""Rows, pages and KV: nothing is handed out twice, nothing is lost, and every bit comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pymllm_interp.mem_cache import KVPool, ReqToTokenPool, TokenToKVPoolAllocator

NUM_PAGES = 7


class AllocatorMachine(RuleBasedStateMachine):
    """Requests come, grow and go; the model is a dict of the pages that each one holds."""

    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        # Slots that do not fill a page are not counted.
        self.allocator = TokenToKVPoolAllocator(NUM_PAGES * self.page_size + self.page_size - 1, self.page_size)
        self.held: list[list[int]] = []

    @property
    def live(self) -> list[int]:
        return [page for pages in self.held for page in pages]

    @rule(n=st.integers(0, NUM_PAGES + 1))
    def alloc(self, n: int) -> None:
        free = NUM_PAGES - len(self.live)
        pages = self.allocator.alloc_pages(n)
        if n > free:
            assert pages is None
        else:
            assert pages is not None and len(pages) == n
            self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.allocator.free_pages(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.live))
        with pytest.raises(ValueError, match="twice"):
            self.allocator.free_pages([page, page])

    @rule(page=st.integers(-1, NUM_PAGES + 1))
    def free_foreign(self, page: int) -> None:
        if page not in self.live:
            with pytest.raises(ValueError, match=rf"\[{page}\]"):
                self.allocator.free_pages([*self.live, page])

    @rule()
    def clear(self) -> None:
        self.allocator.clear()
        self.held = []

    @invariant()
    def every_page_is_free_or_held_once(self) -> None:
        self.allocator.check_integrity(self.live)
        assert len(set(self.live)) == len(self.live)
        assert set(self.live) <= set(range(1, NUM_PAGES + 1))
        assert self.allocator.available_pages() == NUM_PAGES - len(self.live)
        assert self.allocator.available_size() == self.allocator.available_pages() * self.page_size


class Page16AllocatorMachine(AllocatorMachine):
    page_size = 16


class RowMachine(RuleBasedStateMachine):
    """Rows are written, applied and freed; the model is a table that a Python dict fills."""

    size, width = 3, 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = ReqToTokenPool(self.size, self.width, "cpu")
        self.live: set[int] = set()
        self.staged: list[tuple[int, int, list[int]]] = []
        self.visible = torch.zeros(self.size + 1, self.width, dtype=torch.int32)

    @rule()
    def alloc(self) -> None:
        row = self.pool.alloc()
        if len(self.live) == self.size:
            assert row is None
        else:
            assert row is not None and 1 <= row <= self.size and row not in self.live
            self.live.add(row)

    @rule(row=st.integers(0, 4))
    def free(self, row: int) -> None:
        if row in self.live:
            self.pool.free(row)
            self.live.remove(row)
            self.staged = [write for write in self.staged if write[0] != row]
        else:
            with pytest.raises(ValueError, match=f"row={row}"):
                self.pool.free(row)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), as_tensor=st.booleans())
    def write(self, data: st.DataObject, as_tensor: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.live)))
        start = data.draw(st.integers(0, self.width))
        slots = data.draw(st.lists(st.integers(1, 999), max_size=self.width - start))
        self.pool.write(row, start, torch.tensor(slots) if as_tensor else slots)
        self.staged.append((row, start, slots))

    @rule()
    def apply(self) -> None:
        self.pool.apply_staged_writes()
        for row, start, slots in self.staged:
            self.visible[row, start : start + len(slots)] = torch.tensor(slots, dtype=torch.int32)
        self.staged = []

    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, self.size + 1))
        if 1 <= row <= self.size:
            self.pool.claim(row)
            self.live.add(row)
        else:
            with pytest.raises(ValueError, match="expected a row of"):
                self.pool.claim(row)

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.live, self.staged = set(), []
        self.visible.zero_()

    @invariant()
    def only_applied_writes_of_live_rows_are_visible(self) -> None:
        assert self.pool.available_size() == self.size - len(self.live)
        for row in self.live | {0}:
            written = self.visible[row]
            assert torch.equal(self.pool.req_to_token[row][written > 0], written[written > 0])
        assert not self.pool.req_to_token[0].any()


for machine in (AllocatorMachine, Page16AllocatorMachine, RowMachine):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestAllocator = AllocatorMachine.TestCase
TestPage16Allocator = Page16AllocatorMachine.TestCase
TestRows = RowMachine.TestCase


@given(page_size=st.integers(1, 17), pages=st.permutations(range(1, 6)), data=st.data())
def test_position_p_lies_at_offset_p_of_its_page(page_size: int, pages: list[int], data: st.DataObject) -> None:
    allocator = TokenToKVPoolAllocator(5 * page_size, page_size)
    every = [page * page_size + offset for page in pages for offset in range(page_size)]
    start = data.draw(st.integers(0, len(every)))
    stop = data.draw(st.integers(start, len(every)))
    assert allocator.slots_of(pages, start, stop).tolist() == every[start:stop]
    with pytest.raises(ValueError, match="do not reach"):
        allocator.slots_of(pages, 0, len(every) + 1)


@pytest.mark.parametrize(
    "held",
    [[], [1], [2, 3], [2, 2, 3], [0, 2, 3], [1, 2, 3, 4], [1, 2, 5]],
    ids=["all lost", "one lost", "free and held", "held twice", "dummy", "too many", "unknown"],
)
def test_integrity_check_finds_what_is_wrong(held: list[int]) -> None:
    allocator = TokenToKVPoolAllocator(4, 1)
    assert allocator.alloc_pages(2) == [1, 2]
    allocator.check_integrity([2, 1])
    with pytest.raises(AssertionError, match="4 must stand there once"):
        allocator.check_integrity(held)


def test_staged_writes_are_not_visible_before_they_are_applied() -> None:
    pool = ReqToTokenPool(2, 8, "cpu")
    first, second = pool.alloc(), pool.alloc()
    assert first is not None and second is not None
    pool.write(first, 0, [5, 6, 7])
    pool.write(second, 7, torch.tensor([9]))
    pool.write(first, 2, [8])
    assert not pool.req_to_token.any()
    pool.apply_staged_writes()
    assert pool.req_to_token.tolist() == [[0] * 8, [5, 6, 8, 0, 0, 0, 0, 0], [0] * 7 + [9]]
    assert pool.req_to_token.dtype == torch.int32


@pytest.mark.parametrize(("start", "count"), [(8, 1), (0, 9), (6, 3), (-1, 1)])
def test_write_past_the_row_raises_and_writes_nothing(start: int, count: int) -> None:
    pool = ReqToTokenPool(1, 8, "cpu")
    assert pool.alloc() == 1
    with pytest.raises(ValueError, match=r"row=1.* 8 wide"):
        pool.write(1, start, list(range(1, count + 1)))
    pool.apply_staged_writes()
    assert not pool.req_to_token.any()


@pytest.mark.parametrize("row", [0, 1, 2])
def test_rows_that_are_not_in_use_are_not_written(row: int) -> None:
    pool = ReqToTokenPool(1, 8, "cpu")
    assert pool.alloc() == 1
    pool.free(1)
    with pytest.raises(ValueError, match=f"row={row}"):
        pool.write(row, 0, [3])


def test_freeing_a_row_drops_its_staged_writes_alone() -> None:
    pool = ReqToTokenPool(2, 8, "cpu")
    first, second = pool.alloc(), pool.alloc()
    assert first is not None and second is not None
    pool.write(first, 0, [5, 6])
    pool.write(second, 0, [7])
    pool.free(first)
    pool.apply_staged_writes()
    assert not pool.req_to_token[first].any() and pool.req_to_token[second, 0] == 7


def make_pool(page_size: int, dtype: torch.dtype = torch.bfloat16) -> KVPool:
    pool = KVPool(3, 4 * page_size + page_size - 1, 2, 8, dtype, "cpu", page_size)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape))
    return pool


def snapshot(pool: KVPool) -> torch.Tensor:
    """[2, layers, slots, ...] as integers, so that NaN equals itself."""
    return torch.stack((torch.stack(pool.k_buffer), torch.stack(pool.v_buffer))).view(torch.int16).clone()


@pytest.mark.parametrize("page_size", [1, 16])
def test_pool_starts_as_zeros_and_has_the_dummy_page_on_top(page_size: int) -> None:
    pool = KVPool(3, 4 * page_size + page_size - 1, 2, 8, torch.bfloat16, "cpu", page_size)
    assert (pool.size, pool.num_slots) == (4 * page_size, 5 * page_size)
    assert pool.nbytes == pool.num_slots * 2 * 3 * 2 * 8 * 2
    for layer in range(3):
        for buffer, paged in zip(pool.get_kv(layer), pool.paged(layer), strict=True):
            assert buffer.shape == (5 * page_size, 2, 8) and buffer.is_contiguous() and not buffer.any()
            assert paged.shape == (5, page_size, 2, 8) and paged.data_ptr() == buffer.data_ptr()


def test_set_kv_writes_one_layers_slots_and_no_graph() -> None:
    pool = make_pool(4)
    expected = snapshot(pool)
    slots = torch.tensor([9, 4, 19])
    k, v = torch.randn(3, 2, 8, requires_grad=True), torch.randn(3, 2, 8)
    pool.set_kv(1, slots, k, v)
    for index, x in enumerate((k, v)):
        expected[index, 1, slots] = x.detach().bfloat16().view(torch.int16)
    assert torch.equal(snapshot(pool), expected)
    assert not pool.k_buffer[1].requires_grad


@pytest.mark.parametrize("page_size", [1, 16])
def test_swap_round_trip_is_bit_exact_into_other_slots(page_size: int) -> None:
    pool = make_pool(page_size)
    pool.k_buffer[1][page_size] = float("nan")
    pool.v_buffer[2][page_size, 0, 0] = -0.0
    before = snapshot(pool)
    source = list(range(page_size, 3 * page_size))
    host = pool.swap_out(source)
    per_token = sum(buffer[0].nbytes for buffer in (*pool.k_buffer, *pool.v_buffer))
    assert host.num_tokens == len(source) and host.nbytes == len(source) * per_token
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[page_size:].fill_(7.0)
    target = [slot + 2 * page_size for slot in reversed(source)]
    pool.swap_in(target, host)
    after = snapshot(pool)
    assert torch.equal(after[:, :, target], before[:, :, source])
    assert torch.equal(after[:, :, :page_size], before[:, :, :page_size])
    assert (pool.k_buffer[0][source] == 7.0).all()
    with pytest.raises(ValueError, match=f"{len(source) - 1} slots"):
        pool.swap_in(target[1:], host)


def test_copy_moves_all_layers_even_where_source_and_target_overlap() -> None:
    pool = make_pool(4)
    before = snapshot(pool)
    pool.copy([4, 5, 6], torch.tensor([5, 6, 7]))
    after = snapshot(pool)
    assert torch.equal(after[:, :, [5, 6, 7]], before[:, :, [4, 5, 6]])
    untouched = [slot for slot in range(pool.num_slots) if slot not in (5, 6, 7)]
    assert torch.equal(after[:, :, untouched], before[:, :, untouched])
    with pytest.raises(ValueError, match="2 source"):
        pool.copy([4, 5], [6])


def test_sizes_that_make_no_page_are_refused() -> None:
    with pytest.raises(ValueError, match="one page"):
        KVPool(1, 15, 1, 8, torch.float32, "cpu", 16)
    with pytest.raises(ValueError, match="one page"):
        TokenToKVPoolAllocator(15, 16)
    with pytest.raises(ValueError, match="page_size=0"):
        TokenToKVPoolAllocator(15, 0)
    with pytest.raises(ValueError, match="max_context_len=0"):
        ReqToTokenPool(1, 0, "cpu")
