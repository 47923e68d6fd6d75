"""The kernels: the tail (all-reduce + RMSNorm of one partial row, reduce-scatter of another), and
`all_gather_add`. How ranks exchange rows, and why it is sound, is in `protocol.py`."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from jax_latent_tail.kernels import abi, ptx
from jax_latent_tail.kernels.geometry import VECTOR, VECTOR_BYTES, WARP
from jax_latent_tail.kernels.protocol import NAN_PAIR, Protocol, only_if, registers
from jax_latent_tail.kernels.variant import MULTICAST, WIDE_TOP_K

# Slots of the any-K finalize in flight at a time.
_SLOTS_IN_FLIGHT = 4


class Tail(Protocol):
    """All-reduce and norm of L columns (routed role), reduce-scatter of H columns (shared role)."""

    @cute.jit
    def role(self, role, roles):
        if roles == abi.SHARED_MASK:
            role = Int32(abi.SHARED)
        return role

    @cute.jit
    def serve(self, call, operands, role, token, wave, last, failed, carried):
        if role == abi.ROUTED:
            if cutlass.const_expr(self.row_vectors > 0):
                failed = self.all_reduce_norm(call, operands, token, wave, last, failed)
        else:
            if cutlass.const_expr(self.hidden_vectors > 0):
                failed = self.reduce_scatter(call, operands, token, wave, last, failed)
        return failed

    @cute.jit
    def all_reduce_norm(self, call, operands, token, wave, last, failed):
        """One token of the routed role. Returns `failed`, now alike in the whole cluster."""
        call = self.at_home(call)
        header = self.row_vectors  # the vector after the row
        owned = self.owned(self.row_vectors + 1)
        # All loads go out before the first of them is used.
        status, workspace, generation = self.enter(call, abi.ROUTED, token)
        targets = self.targets(call)
        own = registers(owned, 4, Uint32)
        for k in cutlass.range_constexpr(owned):
            vector = call.owner + k * self.geometry.lanes
            for i in cutlass.range_constexpr(4):
                own[k, i] = Uint32(0)
            if vector < self.row_vectors:
                words = self.contribution(operands, token, vector)
                for i in cutlass.range_constexpr(4):
                    own[k, i] = words[i]
        self.prepare(call, wave)

        if status != 0:
            failed = Uint32(abi.TOLD)
        slot = self.slot(call, token, generation)
        peers = Uint32(self.everyone) & ~(Uint32(1) << Uint32(call.rank))
        if failed != 0:
            peers = Uint32(0)
        for k in cutlass.range_constexpr(owned):
            vector = call.owner + k * self.geometry.lanes
            for i in cutlass.range_constexpr(4):
                own[k, i] = ptx.without_sentinel(own[k, i])
            self.put_header(call, vector == header, own, k, generation)
            place = call.rank * self.layout.routed_pitch + vector * VECTOR_BYTES
            self.publish(targets, slot + Int64(place), only_if(vector <= header, peers), own, k)
        if cutlass.const_expr(self.variant.trigger):
            cute.arch.griddepcontrol_launch_dependents()

        scale = registers(owned, 4, Uint32)  # arrives while the rows travel
        for k in cutlass.range_constexpr(owned):
            vector = call.owner + k * self.geometry.lanes
            for i in cutlass.range_constexpr(4):
                scale[k, i] = Uint32(0)
            if vector < self.row_vectors:
                words = ptx.load_vector(operands.gamma + Int64(vector) * VECTOR_BYTES)
                for i in cutlass.range_constexpr(4):
                    scale[k, i] = words[i]
        self.meet(wave)

        x = registers(owned, VECTOR, Float32)
        squares = Float32(0.0)
        for k in cutlass.range_constexpr(owned):
            vector = call.owner + k * self.geometry.lanes
            for i in cutlass.range_constexpr(VECTOR):
                x[k, i] = Float32(0.0)
            if self.warp_begins(call, k) <= header:
                words = registers(self.tp, 4, Uint32)
                for source in cutlass.range_constexpr(self.tp):
                    for i in cutlass.range_constexpr(4):
                        words[source, i] = own[k, i]
                address = workspace + slot + Int64(vector * VECTOR_BYTES)
                failed = self.take(
                    call, words, address, self.layout.routed_pitch,
                    only_if(vector <= header, peers), vector == header,
                    header - self.warp_begins(call, k) < WARP, generation, failed,
                )  # fmt: skip
                terms = []
                for i in cutlass.range_constexpr(4):
                    lo, hi = self.sum_in_rank_order(words, i)
                    if cutlass.const_expr(self.variant.fp32_internal):
                        terms += [lo * lo, hi * hi]
                    else:
                        rounded = ptx.pack(lo, hi)
                        lo, hi = ptx.low(rounded), ptx.high(rounded)
                        square = ptx.pack(lo * lo, hi * hi)
                        terms += [ptx.low(square), ptx.high(square)]
                    x[k, 2 * i] = lo
                    x[k, 2 * i + 1] = hi
                term = self.tree_sum(terms)
                if vector >= self.row_vectors:
                    term = Float32(0.0)
                squares = squares + term

        for step in cutlass.range_constexpr(5):
            squares = squares + cute.arch.shuffle_sync_bfly(squares, offset=WARP >> 1 >> step)
        total, failed = self.exchange(call, squares, failed, wave, last, self.geometry.cluster)
        self.advance(call, abi.ROUTED, token, generation, failed)

        # A poisoned row turns NaN here, without a test.
        mean = total * Float32(1.0 / self.variant.latent)
        inverse = cute.math.rsqrt(mean + operands.eps, fastmath=True)
        for k in cutlass.range_constexpr(owned):
            vector = call.owner + k * self.geometry.lanes
            if vector < self.row_vectors:
                out = []
                for i in cutlass.range_constexpr(4):
                    lo = x[k, 2 * i] * inverse * ptx.low(scale[k, i])
                    hi = x[k, 2 * i + 1] * inverse * ptx.high(scale[k, i])
                    out.append(ptx.pack(lo, hi))
                offset = Int64(token) * self.row_bytes + Int64(vector) * VECTOR_BYTES
                ptx.store_vector(operands.latent + offset, out[0], out[1], out[2], out[3])
        return failed

    @cute.jit
    def reduce_scatter(self, call, operands, token, wave, last, failed):
        """One token of the shared role. Returns `failed`, right in the CTAs that store."""
        call = self.at_home(call)
        # To scatter: the whole row, then a header for each rank.
        scattered = self.owned(self.hidden_vectors + self.tp)
        status, workspace, generation = self.enter(call, abi.SHARED, token)
        own = registers(scattered, 4, Uint32)
        targets = registers(scattered, 1, Int64)
        places = registers(scattered, 1, Int32)
        for k in cutlass.range_constexpr(scattered):
            vector = call.owner + k * self.geometry.lanes
            for i in cutlass.range_constexpr(4):
                own[k, i] = Uint32(0)
            targets[k, 0] = Int64(0)
            places[k, 0] = Int32(0)
            if vector < self.hidden_vectors + self.tp:
                target = vector - self.hidden_vectors
                places[k, 0] = Int32(self.shard_vectors)
                if vector < self.hidden_vectors:
                    target = Int32(Uint32(vector) // Uint32(self.shard_vectors))
                    places[k, 0] = vector - target * self.shard_vectors
                    offset = Int64(token) * self.hidden_bytes + Int64(vector) * VECTOR_BYTES
                    words = ptx.load_vector(operands.shared + offset)
                    for i in cutlass.range_constexpr(4):
                        own[k, i] = words[i]
                targets[k, 0] = self.peer_workspace(call, target)
        self.prepare(call, wave)

        if status != 0:
            failed = Uint32(abi.TOLD)
        slot = self.slot(call, token, generation) + self.layout.shared_offset
        sources = Uint32(self.everyone)
        if failed != 0:
            sources = Uint32(0)
        for k in cutlass.range_constexpr(scattered):
            vector = call.owner + k * self.geometry.lanes
            for i in cutlass.range_constexpr(4):
                own[k, i] = ptx.without_sentinel(own[k, i])
            self.put_header(call, vector >= self.hidden_vectors, own, k, generation)
            place = call.rank * self.layout.shared_pitch + places[k, 0] * VECTOR_BYTES
            ptx.publish_vector(
                targets[k, 0] + slot + Int64(place),
                only_if(vector < self.hidden_vectors + self.tp, sources),
                own[k, 0], own[k, 1], own[k, 2], own[k, 3],
            )  # fmt: skip
        if cutlass.const_expr(self.variant.trigger):
            cute.arch.griddepcontrol_launch_dependents()
        self.meet(wave)

        header = self.shard_vectors  # the vector after the row
        owned = self.owned(self.shard_vectors + 1)
        sums = registers(owned, 4, Uint32)
        for k in cutlass.range_constexpr(owned):
            vector = call.owner + k * self.geometry.lanes
            for i in cutlass.range_constexpr(4):
                sums[k, i] = Uint32(0)
            if self.warp_begins(call, k) <= header:
                words = registers(self.tp, 4, Uint32)
                for source in cutlass.range_constexpr(self.tp):
                    for i in cutlass.range_constexpr(4):
                        words[source, i] = Uint32(0)
                failed = self.take(
                    call, words, workspace + slot + Int64(vector * VECTOR_BYTES),
                    self.layout.shared_pitch, only_if(vector <= header, sources), vector == header,
                    header - self.warp_begins(call, k) < WARP, generation, failed,
                )  # fmt: skip
                for i in cutlass.range_constexpr(4):
                    lo, hi = self.sum_in_rank_order(words, i)
                    sums[k, i] = ptx.pack(lo, hi)

        receivers = min(-(-self.shard_vectors // self.geometry.threads), self.geometry.cluster)
        _, failed = self.exchange(call, Float32(0.0), failed, wave, last, receivers)
        self.advance(call, abi.SHARED, token, generation, failed)
        for k in cutlass.range_constexpr(owned):
            vector = call.owner + k * self.geometry.lanes
            if vector < self.shard_vectors:
                if failed != 0:
                    for i in cutlass.range_constexpr(4):
                        sums[k, i] = Uint32(NAN_PAIR)
                offset = Int64(token) * self.shard_bytes + Int64(vector) * VECTOR_BYTES
                ptx.store_vector(
                    operands.shard + offset, sums[k, 0], sums[k, 1], sums[k, 2], sums[k, 3]
                )
        return failed

    # ---- arithmetic

    @cute.jit
    def contribution(self, operands, token, vector):
        """Four words of this rank's partial row: given, or finalized from expert rows.

        The finalize sums weight * row over the slots, in fp32 from +0. A slot with index < 0 is
        skipped; one with index >= P makes the sum NaN. Neither is read.
        """
        offset = Int64(vector) * VECTOR_BYTES
        if cutlass.const_expr(self.variant.top_k == 0):
            return ptx.load_vector(operands.rows + Int64(token) * self.row_bytes + offset)
        sums = registers(1, VECTOR, Float32)
        for i in cutlass.range_constexpr(VECTOR):
            sums[0, i] = Float32(0.0)
        if cutlass.const_expr(self.variant.top_k in WIDE_TOP_K):
            slots = self.variant.top_k
            index_words, weight_words = [], []
            for group in cutlass.range_constexpr(slots // 4):
                address = operands.indices + (Int64(token) * slots + group * 4) * 4
                index_words += ptx.load_vector(address)
            for group in cutlass.range_constexpr(slots // 8):
                address = operands.weights + (Int64(token) * slots + group * 8) * 2
                for word in ptx.load_vector(address):
                    weight_words += [ptx.low(word), ptx.high(word)]
            expert_rows = [Int32(word) for word in index_words]
            for group in cutlass.range_constexpr(0, slots, 8):
                self.accumulate(
                    sums, operands.rows + offset, expert_rows[group : group + 8],
                    weight_words[group : group + 8], operands.permuted_rows,
                )  # fmt: skip
        else:
            slot = Int32(0)
            while slot < operands.top_k:
                expert_rows, weight_words = [], []
                for ahead in cutlass.range_constexpr(_SLOTS_IN_FLIGHT):
                    index, weight = Uint32(0xFFFFFFFF), Uint32(0)
                    if slot + ahead < operands.top_k:
                        position = Int64(token) * Int64(operands.top_k) + Int64(slot + ahead)
                        index = ptx.load_word(operands.indices + position * 4)
                        weight = ptx.load_half(operands.weights + position * 2)
                    expert_rows.append(Int32(index))
                    weight_words.append(ptx.low(weight))
                self.accumulate(
                    sums, operands.rows + offset, expert_rows, weight_words, operands.permuted_rows,
                )  # fmt: skip
                slot = slot + _SLOTS_IN_FLIGHT
        return tuple(ptx.pack(sums[0, 2 * i], sums[0, 2 * i + 1]) for i in range(4))

    @cute.jit
    def accumulate(self, sums, rows, expert_rows, weights, permuted_rows):
        """sums += weight * row, slot by slot; all rows are loaded before the first is used."""
        data = [
            ptx.load_row_vector(rows + Int64(index) * self.row_bytes, index, permuted_rows)
            for index in expert_rows
        ]
        for slot in cutlass.range_constexpr(len(expert_rows)):
            weight = weights[slot]
            if expert_rows[slot] < 0:
                weight = Float32(0.0)
            for i in cutlass.range_constexpr(4):
                sums[0, 2 * i] = sums[0, 2 * i] + ptx.low(data[slot][i]) * weight
                sums[0, 2 * i + 1] = sums[0, 2 * i + 1] + ptx.high(data[slot][i]) * weight

    @cute.jit
    def sum_in_rank_order(self, words, i):
        """The two columns of word i, summed over ranks in fp32 from +0."""
        lo, hi = Float32(0.0), Float32(0.0)
        for source in cutlass.range_constexpr(self.tp):
            lo = lo + ptx.low(words[source, i])
            hi = hi + ptx.high(words[source, i])
        return lo, hi


class AllGatherAdd(Protocol):
    """The columns of all ranks side by side, plus a residual.

    The arrays of a call: `shared` is this rank's x [M, S], `rows` the residual [M, H] or 0 for
    none, `shard` the output [M, H]. The CTAs of a cluster form `geometry.groups` groups. Each group
    sends the whole row of S columns to its own ranks, and takes, adds and stores theirs.
    """

    @cute.jit
    def serve(self, call, operands, role, token, wave, last, failed, carried):
        call = self.at_home(call)
        groups = self.geometry.groups
        header = self.shard_vectors  # the vector after the row
        owned = self.owned(self.shard_vectors + 1)
        first, place = self.first(call), self.place(call)
        # Of the first of this thread's output vectors.
        output = Int64(token) * self.hidden_bytes
        output = output + Int64(first * self.shard_bytes + place * VECTOR_BYTES)
        # All loads go out before the first of them is used.
        status, workspace, generation = self.enter(call, abi.SHARED, token)
        targets = self.targets(call)
        own = registers(owned, 4, Uint32)
        addends = registers(owned * self.sources, 4, Uint32)
        for k in cutlass.range_constexpr(owned):
            vector = place + k * self.geometry.lanes
            offset = Int64(token) * self.shard_bytes + Int64(vector) * VECTOR_BYTES
            given = ptx.load_vector_if(operands.shared + offset, Uint32(vector < header))
            for i in cutlass.range_constexpr(4):
                own[k, i] = given[i]
        for k in cutlass.range_constexpr(owned):
            for source in cutlass.range_constexpr(self.sources):
                there = self.has_output(call, k, source) & Uint32(operands.rows != 0)
                given = ptx.load_vector_if(
                    operands.rows + output + self.output_offset(k, source), there
                )
                for i in cutlass.range_constexpr(4):
                    addends[k * self.sources + source, i] = given[i]
        self.prepare(call, wave)

        if status != 0:
            failed = Uint32(abi.TOLD)
        slot = self.slot(call, token, generation) + self.layout.shared_offset
        peers = Uint32(self.everyone) & ~(Uint32(1) << Uint32(call.rank))
        if failed != 0:
            peers = Uint32(0)
        mine = peers
        if cutlass.const_expr(groups > 1):
            mine = peers >> Uint32(first) & Uint32((1 << self.sources) - 1)
        for k in cutlass.range_constexpr(owned):
            vector = place + k * self.geometry.lanes
            for i in cutlass.range_constexpr(4):
                own[k, i] = ptx.escaped(own[k, i])
            self.put_header(call, vector == header, own, k, generation)
            to = only_if(vector <= header, mine)
            if cutlass.const_expr(self.variant.publish == MULTICAST):
                turn = (call.warp ^ call.cta) & (groups - 1)  # each warp's row once, by some group
                to = only_if((vector <= header) & (turn == 0), peers)
            offset = call.rank * self.layout.shared_pitch + vector * VECTOR_BYTES
            self.publish(targets, slot + Int64(offset), to, own, k)
        if cutlass.const_expr(self.variant.trigger):
            cute.arch.griddepcontrol_launch_dependents()
        self.meet(wave)

        for k in cutlass.range_constexpr(owned):
            vector = place + k * self.geometry.lanes
            if self.warp_begins(call, k) <= header:
                words = registers(self.sources, 4, Uint32)
                for source in cutlass.range_constexpr(self.sources):
                    for i in cutlass.range_constexpr(4):
                        words[source, i] = own[k, i]
                offset = first * self.layout.shared_pitch + vector * VECTOR_BYTES
                failed = self.take(
                    call, words, workspace + slot + Int64(offset), self.layout.shared_pitch,
                    only_if(vector <= header, mine), vector == header,
                    header - self.warp_begins(call, k) < WARP, generation, failed,
                )  # fmt: skip
                for source in cutlass.range_constexpr(self.sources):
                    for i in cutlass.range_constexpr(4):
                        words[source, i] = ptx.unescaped(words[source, i])
                if operands.rows != 0:
                    for source in cutlass.range_constexpr(self.sources):
                        for i in cutlass.range_constexpr(4):
                            addend = addends[k * self.sources + source, i]
                            words[source, i] = ptx.pack(
                                ptx.low(words[source, i]) + ptx.low(addend),
                                ptx.high(words[source, i]) + ptx.high(addend),
                            )
                # While the verdict travels. What turns out to have failed is overwritten below.
                for source in cutlass.range_constexpr(self.sources):
                    ptx.store_vector_if(
                        operands.shard + output + self.output_offset(k, source),
                        self.has_output(call, k, source),
                        words[source, 0], words[source, 1], words[source, 2], words[source, 3],
                    )  # fmt: skip

        _, failed = self.exchange(call, Float32(0.0), failed, wave, last, self.geometry.cluster)
        self.advance(call, abi.SHARED, token, generation, failed)
        if failed != 0:
            nan = Uint32(NAN_PAIR)
            for k in cutlass.range_constexpr(owned):
                for source in cutlass.range_constexpr(self.sources):
                    ptx.store_vector_if(
                        operands.shard + output + self.output_offset(k, source),
                        self.has_output(call, k, source), nan, nan, nan, nan,
                    )  # fmt: skip
        return failed

    def output_offset(self, k: int, source: int) -> int:
        """Bytes from a thread's first output vector to that of stride k and rank first + source."""
        return source * self.shard_bytes + k * self.geometry.lanes * VECTOR_BYTES

    @cute.jit
    def has_output(self, call, k: cutlass.Constexpr, source: cutlass.Constexpr):
        """1 where this thread owns a vector of stride k and there is a rank first + source."""
        there = self.place(call) + k * self.geometry.lanes < self.shard_vectors
        if cutlass.const_expr(self.sources * self.geometry.groups > self.tp):
            there = there & (self.first(call) + source < self.tp)
        return Uint32(there)
