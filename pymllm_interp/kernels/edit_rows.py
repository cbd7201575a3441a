# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""Declared ops and captures on rows in registers, for Triton kernels. The tables' layout is in edit_codes.py.

Functions take rows and tables as tuples. The compiled code is that of single arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import edit_codes as codes

ADD, PROJECT_OUT, CLAMP = tl.constexpr(codes.ADD), tl.constexpr(codes.PROJECT_OUT), tl.constexpr(codes.CLAMP)
SCALE, PATCH, GATE = tl.constexpr(codes.SCALE), tl.constexpr(codes.PATCH), tl.constexpr(codes.GATE)
SET_FEATURE, SCORE = tl.constexpr(codes.SET_FEATURE), tl.constexpr(codes.SCORE)
RECONSTRUCT = tl.constexpr(codes.RECONSTRUCT)
MAX_GATES, NO_END = tl.constexpr(codes.MAX_GATES), tl.constexpr(codes.NO_END)
PRESERVE, MATCH = tl.constexpr(codes.PRESERVE), tl.constexpr(codes.MATCH)
MORE, WORDS, HEADS_WORD = tl.constexpr(codes.MORE), tl.constexpr(codes.WORDS), tl.constexpr(codes.HEADS_WORD)
FLOAT16, CAPTURE_WORDS = tl.constexpr(codes.FLOAT16), tl.constexpr(codes.CAPTURE_WORDS)


@triton.jit
def _first_vector(word, kind, vectors, column, mask, WIDTH: tl.constexpr):
    """The first vector [rows, block] of the ops at `word` [rows, 1]; 0 for rows without an op."""
    first = tl.load(word + 1, mask=kind > 0, other=0, eviction_policy="evict_last").to(tl.int64)
    return tl.load(vectors + first * WIDTH + column, mask=(kind > 0) & mask, other=0.0, eviction_policy="evict_last")


@triton.jit
def _set_flag(word, reads, fired, owner, position, row, flags, first_fired):
    """Set the flags [rows, 1] of the GATEs `reads`, by their `flag_word`, for ops that look later in the pass."""
    slot, of_prompt = (-2 - word) // 2, ((-2 - word) & 1) > 0
    by_row = reads & (of_prompt == 0)
    bit = tl.full(word.shape, 1, tl.int64) << slot
    before = tl.load(flags + row, mask=by_row, other=0, volatile=True)
    tl.store(flags + row, tl.where(fired, before | bit, before & ~bit), mask=by_row)
    tl.atomic_min(first_fired + owner * MAX_GATES + slot, position, mask=reads & of_prompt & fired)
    tl.debug_barrier()  # an op at the next site may be in this kernel


@triton.jit
def _flag(word, looks, owner, position, row, flags, first_fired):
    """Whether the flags [rows, 1] of `flag_word` are set, for the ops that look."""
    slot, of_prompt = (-2 - word) // 2, ((-2 - word) & 1) > 0
    bits = tl.load(flags + row, mask=looks & (of_prompt == 0), other=0, volatile=True)
    first = tl.load(first_fired + owner * MAX_GATES + slot, mask=looks & of_prompt, other=NO_END, volatile=True)
    return tl.where(of_prompt, position >= first, ((bits >> slot) & 1) > 0)


@triton.jit
def _set_features(
    state, edited, sets, rank, first, column_word, features, row, vectors, column, mask, SPAN: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """`edited` [rows, block] with the features of SET_FEATURE at their targets, in the rows `sets`; they are read from `state`.

    Args:
        column_word: [rows, 1] float32. 1 plus the column of the first feature in the row's memory, or 0: they are computed. The
            factor of the output is behind the last.
    """
    if COLUMNS:
        encoded = sets & (column_word > 0.0)
        memory = features + row * COLUMNS + tl.where(encoded, column_word - 1.0, 0.0).to(tl.int32)
        scale = tl.load(memory + rank, mask=encoded, other=1.0)
    for j in range(0, tl.max(tl.where(sets, rank, 0))):
        now = sets & (j < rank)
        source = vectors + (first + 3 * j * SPAN) * WIDTH
        encoder = tl.load(source + column, mask=now & mask, other=0.0, eviction_policy="evict_last")
        decoder = tl.load(source + SPAN * WIDTH + column, mask=now & mask, other=0.0, eviction_policy="evict_last")
        number = source + 2 * SPAN * WIDTH
        dot = tl.sum(state * encoder, axis=1, keep_dims=True)
        active = dot + tl.load(number + 2, mask=now, other=0.0) > tl.load(number + 3, mask=now, other=0.0)
        feature = tl.load(number, mask=now, other=0.0) * dot + tl.load(number + 1, mask=now, other=0.0)
        feature = tl.where(active, tl.maximum(feature, 0.0), 0.0)
        if COLUMNS:
            feature = tl.where(encoded, tl.load(memory + j, mask=now & encoded, other=0.0), feature)
        target = tl.load(number + 4, mask=now, other=0.0) * feature + tl.load(number + 5, mask=now, other=0.0)
        target = tl.maximum(target, tl.load(number + 6, mask=now, other=0.0))
        change = tl.minimum(target, tl.load(number + 7, mask=now, other=0.0)) - feature
        if COLUMNS:
            change = change * scale
        edited = tl.where(now & (change != 0.0), edited + change * decoder, edited)
    return edited


@triton.jit
def _words_of(word, live, position):
    """Words of the op at `word` [rows, 1], and the rows of `live` with their position in its window.
    Returns live, first vector, start and step of the window, probe, a, b: each [rows, 1]."""
    first = tl.load(word + 1, mask=live, other=0, eviction_policy="evict_last").to(tl.int64)
    start = tl.load(word + 2, mask=live, other=0, eviction_policy="evict_last")
    stop = tl.load(word + 3, mask=live, other=0, eviction_policy="evict_last")
    step = tl.load(word + 4, mask=live, other=1, eviction_policy="evict_last")
    probe_row = tl.load(word + 5, mask=live, other=-1, eviction_policy="evict_last").to(tl.int64)
    a = tl.load(word + 6, mask=live, other=0, eviction_policy="evict_last").to(tl.float32, bitcast=True)
    b = tl.load(word + 7, mask=live, other=0, eviction_policy="evict_last").to(tl.float32, bitcast=True)
    live = live & (position >= start) & (position < stop) & ((position - start) % step == 0)
    return live, first, start, step, probe_row, a, b


@triton.jit
def _count(fires, position, fired):
    """Count the rows of `fired` [rows, 1] that count, and keep the last position."""
    fired = fired & (position >= tl.load(fires + 2, mask=fired, other=0))
    tl.atomic_add(fires, 1, mask=fired, sem="relaxed")
    tl.atomic_max(fires + 1, position, mask=fired, sem="relaxed")


@triton.jit
def _conditions(
    live, gates, state, first, probe_row, word, fires, op, rows, vectors, flags, first_fired, WIDTH: tl.constexpr,
):  # fmt: skip
    """The rows of `live` [rows, 1] with an op that acts, by its gate and flag. `fires` counts them. Rows of a GATE set its flag.

    Args:
        gates: [rows, 1], rows with a GATE.
        state: [rows, block], the part of the state that the op sees.
    """
    owner, position, row, column, mask, _ = rows
    reads = live & gates
    gated = live & ((probe_row >= 0) | reads)
    if tl.max(gated.to(tl.int32)) > 0:
        source = vectors + tl.where(reads, first, probe_row) * WIDTH + column
        probe = tl.load(source, mask=gated & mask, other=0.0, eviction_policy="evict_last")
        dot = tl.sum(state * probe, axis=1, keep_dims=True)
        threshold = tl.load(word + 8, mask=gated, other=0).to(tl.float32, bitcast=True)
        if tl.max(reads.to(tl.int32)) > 0:
            _set_flag(probe_row, reads, dot > threshold, owner, position, row, flags, first_fired)
        live = live & (reads == 0) & ((gated == 0) | (dot > threshold))
        _count(fires + 3 * op, position, gated & live)
    looks = live & (probe_row < -1)
    if tl.max(looks.to(tl.int32)) > 0:
        live = live & ((looks == 0) | _flag(probe_row, looks, owner, position, row, flags, first_fired))
        _count(fires + 3 * op, position, looks & live)
    return live


@triton.jit
def _apply_ops(
    value, rows, site, kind, vector, tables, SIZE: tl.constexpr, SITES: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """`value` [rows, block] float32 after the ops of each row's owner at `site`, rounded after each op.

    Every op adds multiples of its vectors to a part of the state, so that one loop serves all ops. Short code matters: it
    shares the cache with the model's weights.

    Args:
        rows: (owner, position, row, column, mask, inside).
        kind: [rows, 1], the first word of each row's first op.
        tables: (ops, fires, vectors, flags, first_fired, features, scores, score_stride).
        vector: [rows, block], the first vector of that op.
        HEAD_DIM: channels of a head, or 0 for a state without heads. An op sees zeros at heads that are not its own.
        COLUMNS: width of a row's memory, `features`, at sites that encoders write; else 0.
    """
    owner, position, row, column, mask, inside = rows
    ops, fires, vectors, flags, first_fired, features, scores, score_stride = tables
    fresh = 1  # whether `vector` is the current op's first vector
    span: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH  # rows of the pool that a vector takes
    op = (owner * SITES + site) * DEPTH
    while tl.max(kind) > 0:
        word = ops + op * WORDS
        code, rank, norms = kind & 255, (kind >> 8) & 255, (kind >> 16) & 255
        live, first, start, step, probe_row, a, b = _words_of(word, inside & (kind > 0), position)
        state = value
        if HEAD_DIM:
            head = column // HEAD_DIM
            bits = tl.load(word + HEADS_WORD + head // 32, mask=live & mask, other=0, eviction_policy="evict_last")
            own = ((bits >> (head % 32)) & 1) > 0
            state = tl.where(own, value, 0.0)
        live = _conditions(
            live, code == GATE, state, first, probe_row, word, fires, op, rows, vectors, flags, first_fired, WIDTH
        )
        norm = tl.zeros_like(a)
        if tl.max(tl.where(live, norms, 0)) > 0:
            norm = tl.sqrt(tl.sum(state * state, axis=1, keep_dims=True))
        stores = live & (code == SCORE)
        along = stores | (live & ((code == PROJECT_OUT) | (code == CLAMP)))
        patches = code == PATCH
        # An addition or a patch of rank 2 has one vector per position, in the order of the window.
        single = patches | (code == ADD)
        ordinal = tl.where(single & (rank == 2), (position - start) // step, 0)
        rank = tl.where(single, 1, rank)
        edited = tl.where(patches, 0.0, tl.where(code == SCALE, state * a, state))
        sets = live & (code == SET_FEATURE)
        if tl.max(sets.to(tl.int32)) > 0:
            edited = _set_features(
                state, edited, sets, rank, first, a, features, row, vectors, column, mask, span, WIDTH, COLUMNS
            )
            rank = tl.where(sets, 0, rank)
        if COLUMNS:
            rebuilt = live & (code == RECONSTRUCT)
            memory = features + row * COLUMNS + tl.where(rebuilt, a, 0.0).to(tl.int32) + column
            edited = tl.where(rebuilt, tl.load(memory, mask=rebuilt & mask, other=0.0), edited)
        for j in range(0, tl.max(tl.where(live, rank, 0))):
            now = live & (j < rank)
            if (fresh == 0) | (tl.max(ordinal) > 0):
                source = vectors + (first + (ordinal + j) * span) * WIDTH + column
                vector = tl.load(source, mask=now & mask, other=0.0, eviction_policy="evict_last")
            fresh = 0
            gain = tl.where(patches, 1.0, tl.where(norms == MATCH, a * norm, a))
            if tl.max(along.to(tl.int32)) > 0:
                dot = tl.sum(state * vector, axis=1, keep_dims=True)
                tl.store(scores + (b.to(tl.int32) + j) * score_stride + row, dot, mask=now & stores)
                wanted = tl.where(code == CLAMP, tl.minimum(tl.maximum(dot, a), b), 0.0)
                gain = tl.where(along, tl.where(stores, 0.0, wanted - dot), gain)
            # A gain of 0 must keep all bits: adding +0.0 would change the sign of -0.0.
            edited = tl.where(now & (gain != 0.0), edited + gain * vector, edited)
        if tl.max((live & (norms == PRESERVE)).to(tl.int32)) > 0:
            after = tl.sqrt(tl.sum(edited * edited, axis=1, keep_dims=True))
            edited = tl.where((norms == PRESERVE) & (after > 0.0), edited * (norm / after), edited)
        if HEAD_DIM:
            live = live & own
        value = tl.where(live, edited.to(dtype).to(tl.float32), value)
        fresh = 0
        op += 1
        kind = tl.load(ops + op * WORDS, mask=kind >= MORE, other=0, eviction_policy="evict_last")
    return value


@triton.jit
def _capture(
    value, offset, way, words, first, stop, vectors, ring, column, mask,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store `value` [rows, block] in the ring, at `offset` [rows, 1] of each record, if the record reaches that far.

    Args:
        offset: -1 for rows without a capture.
        way: [rows, 1], `capture_word`; 0 for states in the ring's dtype, else see `_capture_reduced`.
        words: [rows, 1], pointers to each row's words of the capture.
        first, stop: [rows, 1], ends of each row's record.
    """
    place = first + offset
    wanted = (offset >= 0) & (place < stop)
    if tl.max(wanted.to(tl.int32)) > 0:
        start = place
        if ALIGNED:  # whole states are
            start = tl.multiple_of(place, (8, 8))
        tl.store(ring + start + column, value.to(ring.dtype.element_ty), mask=wanted & (way == 0) & mask)
        way = tl.where(wanted, way, 0)
        if tl.max(way) > 0:
            _capture_reduced(value, first, offset, way, words, vectors, ring, column, mask, SIZE, WIDTH, ALIGNED)


@triton.jit
def _capture_reduced(
    value, first, offset, way, words, vectors, ring, column, mask,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store dot products or 16-bit values at `first + offset` [rows, 1]. The dot products are float32, of `value` [rows, block]
    with vectors of the pool. Rows with a `way` of 0 are skipped."""
    span: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH  # rows of the pool that a vector takes
    bits: tl.constexpr = ring.dtype.element_ty.primitive_bitwidth
    count = way & 255
    probe = tl.load(words + 2, mask=count > 0, other=0, eviction_policy="evict_last").to(tl.int64)
    dots = ring.to(tl.pointer_type(tl.float32), bitcast=True) + (first + offset) * bits // 32
    for j in range(0, tl.max(count)):
        source = vectors + (probe + j * span) * WIDTH + column
        vector = tl.load(source, mask=(j < count) & mask, other=0.0, eviction_policy="evict_last")
        tl.store(dots + j, tl.sum(value * vector, axis=1, keep_dims=True), mask=j < count)
    if bits == 32:
        code = way >> 8
        half = value.to(tl.float16).to(tl.int16, bitcast=True)
        half = tl.where(code == FLOAT16, half, value.to(tl.bfloat16).to(tl.int16, bitcast=True))
        start = first * 2 + offset * 2
        if ALIGNED:
            # No wider: Triton lays out a kernel for its widest access, and the norm's sum must keep the order of
            # `triton_kernels.add_rms_norm`.
            start = tl.multiple_of(start, (4, 4))
        halves = ring.to(tl.pointer_type(tl.int16), bitcast=True) + start
        tl.store(halves + column, half, mask=(code > 0) & mask)
