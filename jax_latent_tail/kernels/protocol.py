"""The protocol by which ranks exchange rows, token by token: the steps that all kernels share.

The kernels themselves are in `collective.py` and `projection.py`. Each rank launches one once per
call. A cluster serves one token of one *role* and then strides on by gridDim.x:

    routed:  contribution -> publish to every peer -> take -> sum in rank order -> norm -> store
    shared:  scatter to the peers                  -> take -> sum in rank order         -> store
    gather:  publish to every peer                 -> take -> add the residual          -> store

Routed and shared are the two halves of the tail, in one launch. The gather (`all_gather_add`) is a
kernel of its own with a communicator of its own, in which it has the place of the shared role. So
is `up_gather_add`, which gathers tiles of columns in place of tokens, as it has computed them: a
cluster publishes all its tiles, the header of each first, before it takes any.

The protocol
============

Memory is laid out in `abi.py`. For each (channel, role, token) a rank keeps a *generation* g, the
number of calls that have served this token. Its buffer g & 1 holds a slot for the row of every
source rank. A *word* is 32 bits; the *sentinel* S = 0x80000000 means "not arrived".

One call, for one token, on rank r:

 1. read g;
 2. publish: store the words of r's row (one that is S replaced, see below) into slot r of buffer
    g & 1 of every peer, and after them a 16-byte header (call hash, M, g, 0);
 3. wait: poll the slots of buffer g & 1 until no word is S; *re-arm*: store S into the words just
    read; compare the headers with r's own;
 4. exchange a word among all warps of the cluster, each after its step 3;
 5. one thread advances g; all store their outputs. (The gather stores them before step 4, and NaN
    over them here if the row has failed: nobody reads an output before the kernel has ended.)

Obligations, and why they hold:

 *No word is taken early, twice or torn.* A word is either S or of the current call. Vectors may
 tear between words, never within one, and every word is tested. Own slots of the routed role and
 of the gather are never polled: the rank uses its registers.

 *No published word is S.* As two bf16 it is (+0, -0). A sum from +0 is the same with (+0, +0) in
 its place. The gather copies and may not lose the sign: S travels as `abi.ESCAPED`, a pair of NaNs
 that the taker turns back, and a word that is ESCAPED to begin with as another pair of NaNs. The
 own columns take the same two steps, so all ranks hold the same bits; of all bit patterns only
 that pair is not copied exactly.

 *Two buffers suffice.* Let a peer publish generation g + 2 of a token, into the buffer that g
 used. Its call of generation g + 1 is complete, since kernels on one stream do not overlap (with
 PDL, `griddepcontrol.wait` comes before everything). So it had this rank's words of g + 1, which
 this rank published in a kernel that followed, in the same way, the kernel of g with all its re-
 arming. So the re-arming of g is performed before a word of g + 2 arrives. M may change from call
 to call: the argument is about one token, whose generations count only the calls that served it.
 A peer is at most one generation ahead, and that one fills the other buffer.

 *The generation is read before it is advanced.* All threads of the cluster read it; the advancing
 thread stores only after the exchange, to which every warp contributes after reading.

 *Order between words is never used*, so publishing and polling are relaxed. They are `.sys`
 strong accesses: performed at the memory of the rank that owns the workspace, never in an L1
 cache.

 *Multicast.* A row for all is stored once, by `multimem.st` through the multicast mapping, while
 polling and re-arming use the unicast mapping of the same memory. Accesses to one location
 through two mappings need more than program order, and get it: between this rank's re-arming of g
 (unicast) and a peer's store of g + 2 (multicast) lie the end of this rank's kernel, which
 performs its stores, the observation of g + 1 by the peer, and the start of a kernel there.
 Between the peer's store and the poll that sees it no order is needed, since the poll repeats
 until it sees it. The store also writes the rank's own slot, at any time until that kernel ends;
 that slot is never polled. An ordinary store through a multicast mapping is undefined; there is
 none.

 *Every wait is bounded and failure is sticky.* A wait ends with its words, or when it has lasted
 `Control.deadline_ns`, or when `Control.broken` is set. Whoever fails sets this rank's `broken`;
 the first to fail also takes the record and sets its peers'. `broken` is read on entry and every
 `PATIENCE` failed polls. A thread that has failed publishes nothing and waits for nothing any
 more, in later tokens and calls too; its word in the exchange is `POISON`, so the cluster's whole
 row becomes NaN, its generation stays, and all its threads have then failed. Without the
 stickiness a late peer's words would be taken by a later call. Only a collective reset repairs
 it (`abi.py`). The exchange itself needs no bound: it is between warps of one cluster, resident
 together, each of which contributes exactly once a token whatever happened to it.

 *Disagreement is caught.* The header is the vector after the row, published, polled and re-armed
 like it. One with another hash, M or generation poisons the row. A swapped or missing call of
 identical signature cannot be seen; a surplus call ends at its deadline.

 *A closed communicator* (`Control.closed`) takes the same way as a failed one, so the kernel
 touches nothing but its inputs, its outputs and the control block.

Clusters that wait for each other (all ranks' clusters of one call) must be resident together or
wait only for earlier ones: `geometry.token_ctas` sees to that. The trigger for PDL successors is
compiled only on demand: successors occupy SMs while we wait, and ranks that share a GPU starve
each other."""

# ruff: noqa: SIM102 - conditions on run-time values; `and` would evaluate both sides

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from jax_latent_tail.kernels import abi, ptx
from jax_latent_tail.kernels.abi import Control, Record
from jax_latent_tail.kernels.geometry import VECTOR, WARP, Geometry
from jax_latent_tail.kernels.variant import MULTICAST, KernelVariant

# Failed polls between two looks at the clock and the status: some 50-100 us.
PATIENCE = 256

# A NaN that arithmetic never yields (that one is 0x7fffffff).
POISON = 0xFFC0DEAD
NAN_PAIR = 0x7FFF7FFF


def registers(rows: int, columns: int, dtype):
    """A small array that lives in registers: every index is a compile-time constant."""
    return cute.make_rmem_tensor(cute.make_layout((rows, columns), stride=(columns, 1)), dtype)


def only_if(condition, mask):
    """`mask`, or 0: lanes beyond a row's end go along with none of their accesses active."""
    return Uint32(condition) * mask


def failure(cause, is_header, ranks):
    """What `failed` is in the thread that found a failure, for its report."""
    return cause | (Uint32(is_header) << Uint32(2)) | (ranks << Uint32(8))


@dataclasses.dataclass(frozen=True)
class Operands:
    """The parameters of a call that only its role knows how to use: `abi.LaunchParams`."""

    rows: Int64
    weights: Int64
    indices: Int64
    gamma: Int64
    latent: Int64
    shared: Int64
    shard: Int64
    permuted_rows: Int32
    top_k: Int32
    eps: Float32


@dataclasses.dataclass(frozen=True)
class Call:
    """What every step of a call needs: where this thread is, and the call's parameters."""

    tidx: Int32
    lane: Int32
    warp: Int32  # in the CTA
    cta: Int32  # in the cluster
    owner: Int32  # thread in the cluster
    barriers: Int32  # shared memory: two mbarriers, then two rows of partial sums
    control: Int64
    rank: Int32
    tokens: Int32
    slots: Int32  # in a buffer of the workspace
    channel: Int32
    call_hash: Uint32


class Protocol:
    """What the kernels have in common: one variant in one geometry, its subclass says what for.

    A thread owns the 16-byte vectors g, g + lanes, g + 2 * lanes, ... of a row, where g is its
    place among the threads that the row is spread over. It takes them from `sources` ranks at a
    time, `first(call)` and the following: from all, unless groups of CTAs divide the ranks.

    `failed` is a thread's nonzero word once it takes no further part, see the protocol: what it
    found itself (`failure`), or TOLD. Failures are put on record in one place, away from the fast
    path: the code of a kernel this short is cold, and each jump to new code is waited for.
    """

    def __init__(self, variant: KernelVariant, geometry: Geometry):
        self.variant = variant
        self.geometry = geometry
        self.tp = variant.tp
        self.everyone = (1 << variant.tp) - 1
        self.sources = -(-variant.tp // geometry.groups)
        self.row_bytes = variant.latent * 2
        self.hidden_bytes = variant.hidden * 2
        self.shard_bytes = variant.shard * 2
        self.row_vectors = variant.latent // VECTOR
        self.hidden_vectors = variant.hidden // VECTOR
        self.shard_vectors = variant.shard // VECTOR
        self.layout = variant.slot

    def owned(self, vectors: int) -> int:
        """Vectors of a row that a thread owns, the last perhaps beyond the row's end."""
        return -(-vectors // self.geometry.lanes)

    @cute.kernel
    def kernel(
        self, rows: Int64, weights: Int64, indices: Int64, gamma: Int64, latent: Int64,
        shared: Int64, shard: Int64, control: Int64, tokens: Int32, slots: Int32,
        permuted_rows: Int32, top_k: Int32, rank: Int32, roles: Int32, channel: Int32,
        call_hash: Uint32, eps: Float32,
    ):  # fmt: skip
        """Parameters: `abi.LaunchParams`. Grid (token CTAs, cluster, roles)."""
        tidx, _, _ = cute.arch.thread_idx()
        token, _, role = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        role = self.role(role, roles)

        smem = cutlass.memory.SmemAllocator()
        barriers = smem.allocate_tensor(Int64, cute.make_layout((2,)), byte_alignment=16)
        barriers = Int32(barriers.iterator.toint())

        # Nothing of the call happens before this, not even a load.
        cute.arch.griddepcontrol_wait()

        operands = Operands(
            rows, weights, indices, gamma, latent, shared, shard, permuted_rows, top_k, eps
        )
        call = Call(
            tidx=tidx,
            lane=cute.arch.lane_idx(),
            warp=cute.arch.make_warp_uniform(cute.arch.warp_idx()),
            cta=cta,
            owner=cta * self.geometry.threads + tidx,
            barriers=barriers,
            control=control,
            rank=rank,
            tokens=tokens,
            slots=slots,
            channel=channel,
            call_hash=call_hash,
        )
        failed = Uint32(0)
        wave = Int32(0)
        carried = self.begin(call, operands, token)
        end = self.end(call)
        while token < end:
            last = token + stride >= end
            failed = self.serve(call, operands, role, token, wave, last, failed, carried)
            ptx.exit_if(Uint32(last & (failed == 0)))  # not by way of the failure's code
            self.report(call, role, token, failed)
            token = token + stride
            wave = wave + 1
        self.leave(call, role, failed)

    @cute.jit
    def role(self, role, roles):
        """The role of this cluster, given blockIdx.z and the call's roles."""
        return Int32(abi.SHARED)

    def begin(self, call, operands, token):
        """Before the first token: what is carried from one to the next, here nothing."""

    def end(self, call):
        """Tokens of the call, or what is served in their place."""
        return call.tokens

    def serve(self, call, operands, role, token, wave, last, failed, carried):
        """One token, from its loads to its stores. Returns `failed`, right in all CTAs that have
        anything to store."""
        raise NotImplementedError

    def at_home(self, call):
        """The same, but the compiler may not compute what follows from it ahead of the token loop:
        it would for both roles, while no load is under way yet, and run out of registers later."""
        names = ("tidx", "cta", "owner", "rank")
        return dataclasses.replace(call, **{n: ptx.opaque(getattr(call, n)) for n in names})

    # ---- where a thread is

    def first(self, call):
        """The first of the ranks that this CTA's group deals with."""
        if self.geometry.groups == 1:
            return 0
        return (call.cta & (self.geometry.groups - 1)) * self.sources

    def place(self, call):
        """This thread's number among those that a row is spread over."""
        if self.geometry.groups == 1:
            return call.owner
        return self.part(call) * self.geometry.threads + call.tidx

    def part(self, call):
        """This CTA's number among those of its group."""
        return call.cta >> (self.geometry.groups.bit_length() - 1)

    def warp_begins(self, call, k):
        """The first vector of this warp in stride k: the same for all its lanes."""
        part = call.cta if self.geometry.groups == 1 else self.part(call)
        first = part * self.geometry.threads + call.warp * WARP
        return first + k * self.geometry.lanes

    # ---- the protocol

    @cute.jit
    def generation_address(self, call, role, token):
        index = Int64(call.channel * 2 + role) * Int64(call.slots) + Int64(token)
        return call.control + abi.GENERATIONS_OFFSET + index * 4

    @cute.jit
    def slot(self, call, token, generation):
        """Byte offset of the token's slot in any workspace."""
        buffer = call.channel * 2 + Int32(generation & Uint32(1))
        return (Int64(buffer) * Int64(call.slots) + Int64(token)) * self.layout.size

    def peer_workspace(self, call, peer):
        """Where this rank has mapped the peer's workspace."""
        return ptx.load_shared_long(call.control + Control.peer_workspace.offset + Int64(peer) * 8)

    def targets(self, call):
        """Where a row for all is stored: the workspaces of this thread's `sources` ranks, or the
        multicast mapping of all."""
        if self.variant.publish == MULTICAST:
            return [ptx.load_shared_long(call.control + Control.multicast.offset)]
        table = call.control + Control.peer_workspace.offset
        targets = []
        if self.geometry.groups > 1:
            table = table + Int64(self.first(call)) * 8
            if self.sources % 2:
                return [ptx.load_shared_long(table + 8 * peer) for peer in range(self.sources)]
        for peer in range(0, self.sources, 2):  # the table has an even number of entries
            targets += ptx.load_shared_longs(table + 8 * peer)
        return targets[: self.sources]

    @cute.jit
    def enter(self, call, role: cutlass.Constexpr, token):
        """What a token needs of the control block: (nonzero if the communicator has failed or is
        closed, own workspace, generation)."""
        status, workspace = ptx.load_shared_longs(call.control + Control.broken.offset)
        generation = ptx.load_shared_word(self.generation_address(call, role, token))
        return status, workspace, generation

    def header_words(self, call, generation):
        """`abi.HEADER_FIELDS` of this call; no word of them is ever the sentinel."""
        return call.call_hash, Uint32(call.tokens), generation, Uint32(0)

    @cute.jit
    def put_header(self, call, here, words, k, generation):
        """words[k] = this call's header, in the thread that owns the vector after the row."""
        if here:
            header = self.header_words(call, generation)
            for i in cutlass.range_constexpr(4):
                words[k, i] = header[i]

    @cute.jit
    def publish(self, targets, offset, peers, words, k):
        """words[k] to `offset` in those of `targets` in the bit set `peers` (multicast: in all, or
        in none)."""
        w0, w1, w2, w3 = words[k, 0], words[k, 1], words[k, 2], words[k, 3]
        if cutlass.const_expr(self.variant.publish == MULTICAST):
            if peers != 0:
                ptx.multicast_vector(targets[0] + offset, w0, w1, w2, w3)
        else:
            for peer in cutlass.range_constexpr(self.sources):
                active = peers & Uint32(1 << peer)
                ptx.publish_vector(targets[peer] + offset, active, w0, w1, w2, w3)

    @cute.jit
    def take(
        self, call, words, address, pitch: cutlass.Constexpr, sources, is_header, in_header_warp,
        generation, failed,
    ):  # fmt: skip
        """Wait for one vector from each rank in the bit set `sources`, then re-arm them.

        words[p] becomes the vector at address + p * pitch for p in `sources`, where p counts from
        `first`; the others, which must not hold a sentinel, stay. Headers must all be this call's
        own. Returns `failed`.
        """
        if failed != 0:
            sources = Uint32(0)
        waiting, cause = self.poll(call, words, address, pitch, sources)
        if in_header_warp:
            disagreement = self.any_disagreement(call, words, generation)
            if is_header & (sources != 0) & (cause == 0) & (disagreement != 0):
                waiting = self.disagreeing(call, words, generation)
                cause = Uint32(abi.MISMATCH)
        consumed = only_if(cause == 0, sources)
        for source in cutlass.range_constexpr(self.sources):
            ptx.rearm_vector(address + source * pitch, consumed & Uint32(1 << source))
        if cause != 0:
            if cutlass.const_expr(self.geometry.groups > 1):
                waiting = waiting << Uint32(self.first(call))
            failed = failure(cause, is_header, waiting)
        return failed

    @cute.jit
    def poll(self, call, words, address, pitch: cutlass.Constexpr, sources):
        """Fill words[p] for p in `sources`. Returns (those still missing, why it gave up or 0).

        The lanes of a warp loop together until all have their words. They need each other next
        anyway, and a warp that diverged here was seen not to reconverge: the compiler then emulates
        every shuffle and vote, at some 100 cycles each.
        """
        waiting = sources
        started = Int64(0)
        cause = Uint32(0)
        late = ptx.any_lane(waiting)
        while (late != 0) & (cause == 0):
            polls = Int32(0)
            while (late != 0) & (polls < PATIENCE):
                missing = Uint32(0)
                for source in cutlass.range_constexpr(self.sources):
                    w0, w1, w2, w3 = ptx.poll_vector(
                        address + source * pitch, waiting & Uint32(1 << source),
                        words[source, 0], words[source, 1], words[source, 2], words[source, 3],
                    )  # fmt: skip
                    words[source, 0], words[source, 1] = w0, w1
                    words[source, 2], words[source, 3] = w2, w3
                    missing = missing | (ptx.any_sentinel(w0, w1, w2, w3) << Uint32(source))
                waiting = missing
                late = ptx.any_lane(waiting)
                polls = polls + 1
            if late != 0:
                cause, started = self.lose_patience(call, started)
                cause = cute.arch.shuffle_sync(cause, 0)
        if waiting == 0:
            cause = Uint32(0)
        return waiting, cause

    def any_disagreement(self, call, headers, generation):
        """Nonzero if some word of some rank's header is not this call's. (`headers` of this rank
        are its own.) Few instructions, since the whole cluster waits for the warp with the header.
        """
        differences = []
        for i, expected in enumerate(self.header_words(call, generation)):
            difference = Uint32(0)
            for source in range(self.sources):
                difference = difference | (headers[source, i] ^ expected)
            differences.append(difference)
        return (differences[0] | differences[1]) | (differences[2] | differences[3])

    @cute.jit
    def disagreeing(self, call, headers, generation):
        """The ranks whose header is not this call's, as a bit set."""
        different = Uint32(0)
        expected = self.header_words(call, generation)
        for source in cutlass.range_constexpr(self.sources):
            for i in cutlass.range_constexpr(4):
                if headers[source, i] != expected[i]:
                    different = different | Uint32(1 << source)
        return different

    @cute.jit
    def lose_patience(self, call, started):
        """After many failed polls: (why to give up or 0, time of the first call of this)."""
        now = ptx.global_timer()
        if started == 0:
            started = now
        cause = Uint32(0)
        if now - started >= ptx.load_shared_long(call.control + Control.deadline_ns.offset):
            cause = Uint32(abi.DEADLINE)
        if ptx.load_shared_word(call.control + Control.broken.offset) != 0:
            cause = Uint32(abi.TOLD)
        return cause, started

    def mbarriers(self, call):
        """Addresses of all mbarriers of a CTA."""
        return [call.barriers, call.barriers + 8]

    @cute.jit
    def prepare(self, call, wave):
        """Before the first exchange, while the first loads are under way: this CTA's mbarriers."""
        if cutlass.const_expr(self.geometry.cluster > 1):
            if wave == 0:
                if call.tidx == 0:
                    for barrier in self.mbarriers(call):
                        ptx.barrier_init(barrier)
                    ptx.barrier_init_fence()
                cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def meet(self, wave):
        """Before the first exchange: all CTAs of the cluster run and have their mbarriers."""
        if cutlass.const_expr(self.geometry.cluster > 1):
            if wave == 0:
                cute.arch.cluster_wait()

    @cute.jit
    def exchange(self, call, value, failed, wave, last, receivers: cutlass.Constexpr):
        """The sum of `value` over the warps of the cluster, in the same order everywhere.

        `value` is equal in the lanes of a warp. If any thread of the cluster has failed the sum is
        NaN and `failed` nonzero in all. Only the first `receivers` CTAs have a use for the result;
        after the last token the others leave without waiting. Returns (sum, failed).
        """
        parity = wave & 1  # a warp may be a token ahead of another, never two
        sums = call.barriers + 16 + parity * self.geometry.partials_bytes
        value = self.poisoned_if(value, failed)
        if cutlass.const_expr(self.geometry.cluster > 1):
            total, failed = self.exchange_in_cluster(
                call, value, failed, wave, last, sums, receivers
            )
        else:
            if call.lane == 0:
                ptx.store_smem_float(sums + call.warp * 4, value)
            cute.arch.barrier()
            total, failed = self.collect(sums, failed)
        return total, failed

    @cute.jit
    def exchange_in_cluster(
        self, call, value, failed, wave, last, sums, receivers: cutlass.Constexpr
    ):
        """The same between CTAs, by stores that an mbarrier of the receiving CTA counts."""
        cluster, warps = self.geometry.cluster, self.geometry.warps
        barrier = call.barriers + (wave & 1) * 8
        listening = Int32(cluster)
        if cutlass.const_expr(receivers < cluster):
            if last:
                listening = Int32(receivers)
        if call.tidx == 0:
            if call.cta < listening:
                ptx.barrier_expect(barrier, Int32(cluster * warps * 4))
        if call.lane < listening:
            ptx.send_float(
                ptx.map_to_cta(sums + (call.cta * warps + call.warp) * 4, call.lane),
                value,
                ptx.map_to_cta(barrier, call.lane),
            )
        total = Float32(0.0)
        if call.cta < listening:
            ptx.barrier_wait(barrier, (wave >> 1) & 1)
            total, failed = self.collect(sums, failed)
        return total, failed

    @cute.jit
    def collect(self, sums, failed):
        """(sum of what all warps sent, `failed` or nonzero if one of them sent POISON)."""
        count = self.geometry.cluster * self.geometry.warps
        parts = []
        for i in cutlass.range_constexpr(0, count // 4 * 4, 4):
            parts += ptx.load_smem_floats(sums + i * 4)
        for i in cutlass.range_constexpr(count // 4 * 4, count):
            parts.append(ptx.load_smem_float(sums + i * 4))
        total = self.tree_sum(parts)
        return total, self.find_poison(total, sums, failed)

    @cute.jit
    def poisoned_if(self, value, failed):
        """`value`, or POISON if any thread of the warp has failed."""
        if ptx.any_lane(failed) != 0:
            value = ptx.as_float(Uint32(POISON))
        return value

    @cute.jit
    def find_poison(self, total, sums, failed):
        """`failed`, or nonzero if one of the words that `total` sums is POISON."""
        if ptx.is_nan(total) != 0:  # seldom: a failure, or NaN in the rows
            for i in cutlass.range(self.geometry.cluster * self.geometry.warps, unroll=1):
                if ptx.as_word(ptx.load_smem_float(sums + i * 4)) == POISON:
                    if failed == 0:
                        failed = Uint32(abi.TOLD)
        return failed

    @cute.jit
    def advance(self, call, role: cutlass.Constexpr, token, generation, failed):
        """After the exchange: the token has been served once more."""
        if (call.owner == 0) & (failed == 0):
            after = (generation + Uint32(1)) & Uint32(abi.GENERATION_MASK)
            ptx.store_word(self.generation_address(call, role, token), after)

    # ---- failure

    @cute.jit
    def report(self, call, role, token, failed):
        """If this thread found a failure: fail this rank; if it is the first, tell all."""
        cause = failed & Uint32(3)
        if (cause == abi.DEADLINE) | (cause == abi.MISMATCH):
            # Every failing thread, whoever claims the record: the next call on this thread's stream
            # must see it, and the claimer may be in another channel's kernel and slow.
            ptx.store_shared_word(
                call.control + Control.broken.offset, cause | (Uint32(call.rank) << Uint32(8))
            )
            if ptx.claim(call.control + Control.claimed.offset) == 0:
                told = Uint32(abi.TOLD) | (Uint32(call.rank) << Uint32(8))
                for peer in cutlass.range(self.tp, unroll=1):
                    address = ptx.load_shared_long(
                        call.control + Control.peer_broken.offset + Int64(peer) * 8
                    )
                    if (peer != call.rank) & (address != 0):
                        ptx.store_shared_word(address, told)
                self.write_record(call, role, token, failed)

    @cute.jit
    def leave(self, call, role, failed):
        """On the way out of a failed call: record that a peer told us, if nothing is recorded."""
        if (call.owner == 0) & (failed != 0):
            broken = ptx.load_shared_word(call.control + Control.broken.offset)
            closed = ptx.load_shared_word(call.control + Control.closed.offset)
            if (closed == 0) & ((broken & Uint32(0xFF)) == abi.TOLD):
                if ptx.claim(call.control + Control.claimed.offset) == 0:
                    teller = Uint32(1) << (broken >> Uint32(8))
                    self.write_record(
                        call, role, Int32(0), failure(Uint32(abi.TOLD), False, teller)
                    )

    def recorded(self, role):
        """What a record says of the role."""
        return role

    @cute.jit
    def write_record(self, call, role, token, failed):
        """Everything but the failure word itself is as it was: nothing was re-armed or advanced."""
        cause, wait, ranks = (
            failed & Uint32(3),
            failed >> Uint32(2) & Uint32(1),
            failed >> Uint32(8),
        )
        generation = ptx.load_shared_word(self.generation_address(call, role, token))
        field, got, expected = Uint32(0), Uint32(0), Uint32(0)
        if cause == abi.MISMATCH:
            first = Int32(ptx.trailing_zeros(ranks))
            layout = self.layout
            place = first * layout.routed_pitch + layout.routed_header
            if role == abi.SHARED:
                place = first * layout.shared_pitch + layout.shared_header + layout.shared_offset
            workspace = ptx.load_shared_long(call.control + Control.workspace.offset)
            header = workspace + self.slot(call, token, generation) + Int64(place)
            ours = self.header_words(call, generation)
            for i in cutlass.range_constexpr(len(ours) - 1, -1, -1):
                theirs = ptx.load_shared_word(header + 4 * i)
                if theirs != ours[i]:
                    field, got, expected = Uint32(i), theirs, ours[i]
        waited = Int64(0)
        if cause == abi.DEADLINE:
            waited = ptx.load_shared_long(call.control + Control.deadline_ns.offset)
        record = ptx.load_shared_long(call.control + Control.record.offset)
        for name, value in (
            ("role", self.recorded(role)),
            ("wait", wait),
            ("field", field),
            ("token", token),
            ("ranks", ranks),
            ("generation", generation),
            ("got", got),
            ("expected", expected),
            ("tokens", call.tokens),
            ("channel", call.channel),
            ("rank", call.rank),
            ("call_hash", call.call_hash),
            ("abi_version", abi.ABI_VERSION),
        ):
            ptx.store_shared_word(record + getattr(Record, name).offset, Uint32(value))
        ptx.store_shared_long(record + Record.waited_ns.offset, waited)
        ptx.release_shared_word(record + Record.code.offset, cause)

    def tree_sum(self, terms):
        """Their sum, in the order with the shortest chain of additions."""
        while len(terms) > 1:
            pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
            terms = pairs + terms[2 * len(pairs) :]
        return terms[0]
