"""The kernel of the up-projection: `all_gather_add` of columns that it computes itself.

For few tokens a product with the stripe w_up [L, S] is a matter of reading the stripe, once and at
the speed of memory. So a cluster takes a tile of 64 columns, and its warps divide the L rows: each
has all of its part of the tile on the way before it needs the first of it, and no two read the
same. What they have is summed in shared memory of the CTA that finishes a token, which adds the
shard, rounds, publishes and takes the peers' columns by the protocol of `protocol.py`, where a tile
has the place of a token.

Registers hold the stripe as the tensor cores want it, without a way through shared memory: of a
product, the order of the rows is free, and so is that of the columns. Lane (g, t) = (lane / 4,
lane % 4) of a warp loads columns 8g .. 8g + 7 of rows 4t .. 4t + 3, 16 bytes a row. In the mma
with number j it has columns 8g + 2j and 8g + 2j + 1 of these rows, as rows g and g + 8 of the
fragment; the fragment's inner indices 2t, 2t + 1, 2t + 8, 2t + 9 are rows 4t .. 4t + 3, for the
stripe and for the latent alike.
"""

import dataclasses
import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from jax_latent_tail.kernels import abi, ptx
from jax_latent_tail.kernels.abi import Control
from jax_latent_tail.kernels.geometry import VECTOR, VECTOR_BYTES, Geometry
from jax_latent_tail.kernels.protocol import NAN_PAIR, Protocol, failure, only_if, registers
from jax_latent_tail.kernels.variant import MULTICAST, UP_STEP, KernelVariant

_TOKENS = 8  # tokens in one mma
_PRODUCTS = 4  # mma of a step: 16 columns each


@dataclasses.dataclass(frozen=True)
class _Place:
    """What a thread has to do once products are summed: one vector of a tile, for one rank."""

    peer: Int32  # that rank; from tp on, none
    vector: Int32
    half: Int32  # which of two groups of 8 tokens, or of two items, at a time
    is_peer: bool  # it is another rank
    publishes: bool
    has_header: bool  # of a tile, with the first token


class UpGatherAdd(Protocol):
    """The columns latent @ w_up + shard of all ranks side by side, plus a residual.

    The arrays of a call: `latent` [M, L], `weights` the stripe w_up [L, S], `shared` this rank's
    shard [M, S], `rows` the residual [M, H] or 0 for none, `shard` the output [M, H].
    """

    def __init__(self, variant: KernelVariant, geometry: Geometry):
        super().__init__(variant, geometry)
        assert geometry.tokens
        assert geometry.cluster == _TOKENS  # CTA c finishes the tokens c, c + 8, ...
        self.sources = 2  # what a thread polls for: a vector and perhaps a header, of one rank
        self.groups = geometry.tokens // _TOKENS  # of tokens
        self.tile_vectors = geometry.tile // VECTOR
        self.chunks = geometry.tile // 4  # of four products in fp32
        # A thread finishes one vector of one token, for one rank, and then that of another token.
        self.lanes = geometry.threads // (2 * self.tile_vectors)  # for the ranks
        self.rounds = math.ceil(self.groups / 2)
        self.warps = geometry.cluster * geometry.warps
        self.steps = math.ceil(variant.latent / UP_STEP / self.warps)  # of each warp
        # Steps whose part of the stripe is on the way at a time: what registers allow.
        at_a_time = {1: 8, 2: 4 if geometry.ctas_per_sm else 7, 4: 4}[self.groups]
        self.steps_of_pass = math.ceil(self.steps / math.ceil(self.steps / at_a_time))

    def end(self, call):
        clusters, _, _ = cute.arch.grid_dim()
        return clusters  # which serve all their tiles at a time

    def recorded(self, role):
        return Int32(abi.TILES)

    def mbarriers(self, call):
        return [*super().mbarriers(call), self.products_barrier(call)]

    def products_barrier(self, call):
        return call.barriers + 16 + 2 * self.geometry.partials_bytes

    def products(self, call):
        """Shared memory: what each CTA has of each token that this one finishes."""
        return self.products_barrier(call) + 16

    def of_warps(self, call):
        """Shared memory: what each warp of this CTA has of each token."""
        return self.products(call) + self.groups * self.geometry.cluster * self.geometry.tile * 4

    # ---- the product

    def begin(self, call, operands, token):
        stripe = registers(self.steps_of_pass * 4, 4, Uint32)
        self.load_stripe(call, operands, token, 0, stripe, True)
        return stripe

    @cute.jit
    def first_row(self, call):
        """The first row of the stripe that this lane loads."""
        warp = call.cta * self.geometry.warps + call.warp
        return warp * (self.steps * UP_STEP) + (call.lane & 3) * 4

    @cute.jit
    def load_stripe(self, call, operands, tile, start: cutlass.Constexpr, stripe, active):
        """This lane's part of the steps from `start` on: a vector of each of its rows."""
        column = tile * self.geometry.tile + (call.lane >> 2) * VECTOR
        row = self.first_row(call) + start * UP_STEP
        address = operands.weights + (Int64(row) * self.variant.shard + Int64(column)) * 2
        active = active & (column < self.variant.shard)
        for step in cutlass.range_constexpr(self.steps_of_pass):
            there = Uint32(active & (row + step * UP_STEP < self.variant.latent))
            if cutlass.const_expr(start + step >= self.steps):
                there = Uint32(0)
            for r in cutlass.range_constexpr(4):
                words = ptx.stream_vector_if(
                    address + (step * UP_STEP + r) * self.shard_bytes, there
                )
                for i in cutlass.range_constexpr(4):
                    stripe[step * 4 + r, i] = words[i]

    def latent(self, call):
        """Shared memory: the latents of all tokens, of the rows that this CTA's warps have."""
        return self.products(call) + self.geometry.products_bytes

    @cute.jit
    def fetch_latent(self, call, operands):
        """Sets them on their way, without a register to hold them."""
        rows = self.geometry.warps * self.steps * UP_STEP
        vectors = rows // VECTOR
        at = call.tidx
        while at < call.tokens * vectors:
            token, vector = at // vectors, at % vectors
            row = call.cta * rows + vector * VECTOR
            source = operands.latent + (Int64(token) * self.variant.latent + Int64(row)) * 2
            there = Uint32(row < self.variant.latent)
            place = self.latent(call) + token * self.geometry.latent_pitch + vector * VECTOR_BYTES
            ptx.copy_vector_async(place, source, there * Uint32(VECTOR_BYTES))
            at = at + self.geometry.threads

    @cute.jit
    def multiply(self, call, start: cutlass.Constexpr, stripe, sums):
        """sums[j, group] += the product of the steps from `start` on that are in `stripe`."""
        row = call.warp * (self.steps * UP_STEP) + (call.lane & 3) * 4
        latent = self.latent(call) + (call.lane >> 2) * self.geometry.latent_pitch + row * 2
        for step in cutlass.range_constexpr(min(self.steps_of_pass, self.steps - start)):
            of_tokens = [
                ptx.load_smem_pair(
                    latent
                    + (group * _TOKENS * self.geometry.latent_pitch + (start + step) * UP_STEP * 2)
                )
                for group in range(self.groups)
            ]
            for j in cutlass.range_constexpr(_PRODUCTS):
                of_rows = [stripe[step * 4 + r, j] for r in range(4)]
                a = (
                    ptx.lows(of_rows[0], of_rows[1]),
                    ptx.highs(of_rows[0], of_rows[1]),
                    ptx.lows(of_rows[2], of_rows[3]),
                    ptx.highs(of_rows[2], of_rows[3]),
                )
                for group in cutlass.range_constexpr(self.groups):
                    at = j * self.groups + group
                    c = tuple(sums[at, i] for i in range(4))
                    c = ptx.multiply_add(a, of_tokens[group], c)
                    for i in cutlass.range_constexpr(4):
                        sums[at, i] = c[i]

    @cute.jit
    def put_products(self, call, sums):
        """What this warp has, into shared memory of its CTA."""
        row = call.warp * (self.groups * _TOKENS)
        quarter = call.lane & 3
        for group in cutlass.range_constexpr(self.groups):
            for odd in cutlass.range_constexpr(2):
                token = group * _TOKENS + quarter * 2 + odd
                for half in cutlass.range_constexpr(2):
                    chunk = self.scattered((call.lane >> 2) * 2 + half, quarter)
                    values = [
                        sums[(2 * half + j) * self.groups + group, 2 * i + odd]
                        for j in range(2)
                        for i in range(2)
                    ]
                    ptx.store_smem_floats(
                        self.of_warps(call) + ((row + token) * self.chunks + chunk) * VECTOR_BYTES,
                        *values,
                    )

    def scattered(self, chunk, quarter):
        """Where a chunk of four columns lies, so that the lanes of a store meet different banks."""
        return chunk ^ ((quarter & 1) | ((quarter & 2) << 1))

    @cute.jit
    def send_products(self, call):
        """What this CTA has of each token, to the one that finishes it."""
        at = call.tidx
        while at < call.tokens * self.chunks:
            token, chunk = at // self.chunks, at % self.chunks
            place = token * self.chunks + self.scattered(chunk, token // 2 & 3)
            parts = [
                ptx.load_smem_floats(
                    self.of_warps(call)
                    + (warp * self.groups * _TOKENS * self.chunks + place) * VECTOR_BYTES
                )
                for warp in range(self.geometry.warps)
            ]
            values = [self.tree_sum([part[i] for part in parts]) for i in range(4)]
            row = token // _TOKENS * self.geometry.cluster + call.cta
            to = token % _TOKENS
            ptx.send_floats(
                ptx.map_to_cta(
                    self.products(call) + (row * self.chunks + chunk) * VECTOR_BYTES, to
                ),
                *values,
                ptx.map_to_cta(self.products_barrier(call), to),
            )
            at = at + self.geometry.threads

    @cute.jit
    def sum_products(self, call, group, column):
        """One column of one token of this CTA, over all rows of the stripe."""
        address = self.products(call) + (
            (group * self.geometry.cluster * self.geometry.tile + column) * 4
        )
        parts = [
            ptx.load_smem_float(address + cta * self.geometry.tile * 4)
            for cta in range(self.geometry.cluster)
        ]
        return self.tree_sum(parts)

    # ---- the tiles of a cluster

    @cute.jit
    def serve(self, call, operands, role, token, wave, last, failed, carried):
        """All tiles of the cluster: computes and publishes one after the other, takes them then."""
        first_tile, stripe = token, carried
        stride, _, _ = cute.arch.grid_dim()
        # Every call serves every tile, so all have one generation.
        status, workspace, generation = self.enter(call, abi.SHARED, first_tile)
        mine = self.place_of_thread(call)
        if cutlass.const_expr(self.variant.publish == MULTICAST):
            target = ptx.load_shared_long(call.control + Control.multicast.offset)
        else:
            target = self.peer_workspace(call, mine.peer & (abi.MAX_RANKS - 1))
        self.fetch_latent(call, operands)
        self.prepare(call, wave)
        if status != 0:
            failed = Uint32(abi.TOLD)
        ptx.copies_arrived()
        cute.arch.barrier()

        tile, turn = first_tile, Int32(0)
        while tile < call.slots:
            self.compute(call, operands, mine, tile, turn, stripe, target, generation, failed)
            tile = tile + stride
            turn = turn + 1
        if cutlass.const_expr(self.tp > 1):
            item = mine.half
            while item - mine.half < turn * self.groups:
                failed = self.take_item(
                    call, operands, mine, first_tile, item, turn, workspace, generation, failed
                )
                item = item + 2

        _, failed = self.exchange(call, Float32(0.0), failed, wave, last, self.geometry.cluster)
        tile = first_tile
        while tile < call.slots:
            self.advance(call, abi.SHARED, tile, generation, failed)
            tile = tile + stride
        if failed != 0:
            self.give_nan(call, operands, mine, first_tile, turn)
        return failed

    def place_of_thread(self, call):
        peer = call.tidx & (self.lanes - 1)
        half = call.tidx // (self.lanes * self.tile_vectors)
        is_peer = (peer < self.tp) & (peer != call.rank)
        publishes = is_peer
        if self.variant.publish == MULTICAST and self.tp > 1:
            publishes = peer == 0
        return _Place(
            peer=peer,
            vector=(call.tidx // self.lanes) & (self.tile_vectors - 1),
            half=half,
            is_peer=is_peer,
            publishes=publishes,
            has_header=(call.cta == 0)
            & (call.tidx % (self.lanes * self.tile_vectors) < self.lanes),
        )

    @cute.jit
    def compute(self, call, operands, mine, tile, turn, stripe, target, generation, failed):
        """Publishes one tile of this rank's columns, and stores them in the own output."""
        stride, _, _ = cute.arch.grid_dim()
        column = tile * self.geometry.tile + mine.vector * VECTOR
        inside = column < self.variant.shard
        addends = registers(self.rounds, 4, Uint32)
        shards = registers(self.rounds, 1, Float32)
        for r in cutlass.range_constexpr(self.rounds):
            token = (mine.half + 2 * r) * _TOKENS + call.cta
            there = inside & (token < call.tokens)
            of_column = Int64(token) * self.variant.shard + Int64(column + (mine.peer & 7))
            shards[r, 0] = ptx.low(ptx.load_half_if(operands.shared + of_column * 2, Uint32(there)))
            added = Uint32(there & (mine.peer == call.rank)) & Uint32(operands.rows != 0)
            output = self.output(token, mine.peer, column)
            given = ptx.load_vector_if(operands.rows + output, added)
            for i in cutlass.range_constexpr(4):
                addends[r, i] = given[i]
        if (call.tidx == 0) & (call.cta < call.tokens):
            finished = (call.tokens - call.cta + _TOKENS - 1) // _TOKENS
            count = finished * (self.geometry.cluster * self.geometry.tile * 4)
            ptx.barrier_expect(self.products_barrier(call), count)
        slot = self.own_slot(call, tile, generation)
        self.put(
            target + slot + Int64(self.layout.shared_header),
            mine.has_header & (mine.half == 0) & mine.publishes & (failed == 0),
            self.header_words(call, generation),
        )

        sums = registers(_PRODUCTS * self.groups, 4, Float32)
        for at in cutlass.range_constexpr(_PRODUCTS * self.groups):
            for i in cutlass.range_constexpr(4):
                sums[at, i] = Float32(0.0)
        self.multiply(call, 0, stripe, sums)
        for start in cutlass.range_constexpr(self.steps_of_pass, self.steps, self.steps_of_pass):
            self.load_stripe(call, operands, tile, start, stripe, True)
            self.multiply(call, start, stripe, sums)
        # The next tile is on its way while this one is finished.
        following = tile + stride < call.slots
        self.load_stripe(call, operands, tile + stride, 0, stripe, following)
        cute.arch.cluster_wait()  # all have read the products of the tile before
        self.put_products(call, sums)
        cute.arch.barrier()
        self.send_products(call)

        if call.cta < call.tokens:
            ptx.barrier_wait(self.products_barrier(call), turn & 1)
        for r in cutlass.range_constexpr(self.rounds):
            group = mine.half + 2 * r
            token = group * _TOKENS + call.cta
            words = registers(1, 4, Uint32)
            for i in cutlass.range_constexpr(4):
                words[0, i] = Uint32(0)
            if token < call.tokens:  # alike in a warp
                of_vector = mine.vector * VECTOR + (mine.peer & 7)
                value = shards[r, 0] + self.sum_products(call, group, of_vector)
                other = cute.arch.shuffle_sync_bfly(value, offset=1)
                pair = ptx.pack(value, other)
                if (mine.peer & 1) != 0:
                    pair = ptx.pack(other, value)
                pair = ptx.escaped(pair)
                for i in cutlass.range_constexpr(4):
                    words[0, i] = cute.arch.shuffle_sync(pair, (call.lane & ~7) + 2 * i)
            there = inside & (token < call.tokens)
            self.put(
                target + slot + self.place_of(token, mine.vector),
                there & mine.publishes & (failed == 0),
                [words[0, i] for i in range(4)],
            )
            self.store(
                call, operands, self.output(token, mine.peer, column),
                Uint32(there & (mine.peer == call.rank)), words, addends, r,
            )  # fmt: skip
        if following:
            # Relaxed: what was read has been used.
            cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def take_item(
        self, call, operands, mine, first_tile, item, turns, workspace, generation, failed
    ):  # fmt: skip
        """Takes the columns of a peer, for one tile and one token, and stores them in the output.

        Items are numbered by tile, and then by group of tokens. Returns `failed`.
        """
        tile, token, column, there = self.locate(call, mine, first_tile, item, turns)
        there = there & mine.is_peer
        output = self.output(token, mine.peer, column)
        addends = registers(1, 4, Uint32)
        given = ptx.load_vector_if(
            operands.rows + output, Uint32(there) & Uint32(operands.rows != 0)
        )
        header = self.header_words(call, generation)
        words = registers(2, 4, Uint32)
        for i in cutlass.range_constexpr(4):
            addends[0, i] = given[i]
            words[0, i] = Uint32(0)
            words[1, i] = header[i]
        sources = Uint32(there)
        if there & mine.has_header & (token < _TOKENS):
            sources = Uint32(3)
        place = self.place_of(token, mine.vector)
        address = workspace + self.slot(call, tile, generation) + self.layout.shared_offset
        failed = self.take_from(
            call, words, address + Int64(mine.peer * self.layout.shared_pitch) + place,
            Int64(self.layout.shared_header) - place, only_if(failed == 0, sources), mine.peer,
            failed, header,
        )  # fmt: skip
        # While the verdict travels. What turns out to have failed is overwritten later.
        self.store(call, operands, output, Uint32(there), words, addends, 0)
        return failed

    @cute.jit
    def give_nan(self, call, operands, mine, first_tile, turns):
        """NaN in place of all that the cluster has stored, if by other threads of the CTA."""
        cute.arch.barrier()
        item = mine.half
        nan = Uint32(NAN_PAIR)
        while item < turns * self.groups:
            _, token, column, there = self.locate(call, mine, first_tile, item, turns)
            ptx.store_vector_if(
                operands.shard + self.output(token, mine.peer, column),
                Uint32(there & (mine.peer < self.tp)), nan, nan, nan, nan,
            )  # fmt: skip
            item = item + 2

    @cute.jit
    def locate(self, call, mine, first_tile, item, turns):
        """(tile, token, column, whether there is such a one)"""
        stride, _, _ = cute.arch.grid_dim()
        tile = first_tile + item // self.groups * stride
        token = item % self.groups * _TOKENS + call.cta
        column = tile * self.geometry.tile + mine.vector * VECTOR
        there = (item < turns * self.groups) & (token < call.tokens) & (column < self.variant.shard)
        return tile, token, column, there

    @cute.jit
    def store(self, call, operands, output, active, words, addends, r):
        """words[0], as they travel, plus addends[r], where there is a residual."""
        for i in cutlass.range_constexpr(4):
            words[0, i] = ptx.unescaped(words[0, i])
        if operands.rows != 0:
            for i in cutlass.range_constexpr(4):
                words[0, i] = ptx.pack(
                    ptx.low(words[0, i]) + ptx.low(addends[r, i]),
                    ptx.high(words[0, i]) + ptx.high(addends[r, i]),
                )
        ptx.store_vector_if(
            operands.shard + output, active, words[0, 0], words[0, 1], words[0, 2], words[0, 3]
        )

    def own_slot(self, call, tile, generation):
        """Byte offset in any workspace of this rank's row of a tile."""
        offset = self.layout.shared_offset + call.rank * self.layout.shared_pitch
        return self.slot(call, tile, generation) + Int64(offset)

    def output(self, token, peer, column):
        """Byte offset of a vector of the output and of the residual."""
        return (Int64(token) * self.variant.hidden + Int64(peer * self.variant.shard + column)) * 2

    def place_of(self, token, vector):
        """Byte offset in a slot's row."""
        return Int64((token * self.tile_vectors + vector) * VECTOR_BYTES)

    @cute.jit
    def put(self, address, active, words):
        """A vector into a peer's workspace, or by multicast into all."""
        if cutlass.const_expr(self.variant.publish == MULTICAST):
            if active:
                ptx.multicast_vector(address, words[0], words[1], words[2], words[3])
        else:
            ptx.publish_vector(address, Uint32(active), words[0], words[1], words[2], words[3])

    @cute.jit
    def take_from(self, call, words, address, to_header, sources, peer, failed, header):
        """Wait for words[0] at `address` and words[1], the header, `to_header` beyond it.

        `sources` says which of them this thread takes from `peer`. Returns `failed`.
        """
        waiting, cause = self.poll(call, words, address, to_header, sources)
        is_header = waiting == 2
        difference = Uint32(0)
        for i in cutlass.range_constexpr(4):
            difference = difference | (words[1, i] ^ header[i])
        if (sources > 1) & (cause == 0) & (difference != 0):
            cause = Uint32(abi.MISMATCH)
            is_header = True
        consumed = only_if(cause == 0, sources)
        for source in cutlass.range_constexpr(2):
            ptx.rearm_vector(address + source * to_header, consumed & Uint32(1 << source))
        if cause != 0:
            failed = failure(cause, is_header, Uint32(1) << Uint32(peer))
        return failed
