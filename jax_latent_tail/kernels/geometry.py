"""How a call is laid over the GPU: clusters, threads and how many tokens at a time.

One cluster serves one token of one role and then strides on. The row is spread over the
`cluster * threads` threads of the cluster in 16-byte vectors; threads beyond the row idle, so any
row fits any geometry. The protocol does not depend on it, but the order of the row sum does: all
ranks use the same geometry for a call, which they do by choosing it from M alone.

In `all_gather_add` a rank takes a row of S columns from each rank. The CTAs of a cluster form
groups that divide the ranks among them; a row is spread over the threads of one group. Group g has
the CTAs g, g + groups, ... of the cluster.

In `up_gather_add` a cluster serves one tile of columns for all tokens. Its warps divide the rows of
the up-projection; then CTA c finishes the tokens c, c + cluster, ...
"""

import dataclasses
import math

from jax_latent_tail.kernels.variant import (
    ALL_GATHER_ADD,
    TAIL,
    UP_GATHER_ADD,
    UP_STEP,
    UP_TILE,
    UP_TOKENS,
)

WARP = 32
VECTOR_BYTES = 16
VECTOR = 8  # bf16 elements in one vector
MAX_CLUSTER = 8  # the portable limit
MAX_THREADS = 512
UP_MAX_LATENT = 6144  # of up_gather_add: what shared memory of capability 12 has room for
SM_SMEM_BYTES = (
    224 << 10
)  # of an SM of capability 9.0 or 10.0, what each CTA takes for itself aside

# From this M on, the GPU is full of clusters and one SM per row beats a row spread over four: the
# exchange stays inside an SM (H200, M = 64: 4.1 us against 5.8 us).
WIDE_FROM_TOKENS = 32

# SMs left free for kernels that XLA may run beside ours on another stream (NCCL takes up to 32).
RESERVED_SMS = 32

# SMs that ranks which share a GPU leave to the one they wait for: its other kernels may need an SM
# that holds nothing else (a GEMM's shared memory), and all SMs may hold a CTA that waits.
UNTOUCHED_SMS = 16


@dataclasses.dataclass(frozen=True)
class Geometry:
    """`cluster` CTAs of `threads` threads each serve one token of one role, in `groups` groups.

    Attributes:
      tokens: most tokens of a call that it is for; None for any number.
      tile: columns of which a cluster computes the products for all tokens; 0 where it computes
        none.
      latent_pitch: bytes of shared memory for one token's part of the latent.
      ctas_per_sm: how many the compiler has to keep registers for; 0 leaves it to the compiler.
    """

    cluster: int
    threads: int
    groups: int = 1
    tokens: int | None = None
    tile: int = 0
    latent_pitch: int = 0
    ctas_per_sm: int = 0

    def __post_init__(self) -> None:
        assert self.cluster in (1, 2, 4, 8)
        assert self.groups in (1, 2, 4, 8)
        assert self.groups <= self.cluster
        assert self.threads % WARP == 0
        assert WARP <= self.threads <= MAX_THREADS

    @property
    def warps(self) -> int:
        """Warps of one CTA."""
        return self.threads // WARP

    @property
    def lanes(self) -> int:
        """Threads that a row is spread over."""
        return self.cluster // self.groups * self.threads

    @property
    def partials_bytes(self) -> int:
        """Shared memory for one word from each warp of the cluster, in whole vectors."""
        return -(-self.cluster * self.warps * 4 // VECTOR_BYTES) * VECTOR_BYTES

    @property
    def products_bytes(self) -> int:
        """Shared memory for what each CTA has of the tokens that one finishes, and each warp of it
        of all."""
        tokens = self.tokens or 0
        return tokens * (1 + self.warps) * self.tile * 4

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one CTA: two mbarriers, two rows of partial sums; where it
        computes, another mbarrier, partial products and the latent."""
        exchanges = 16 + 2 * self.partials_bytes
        if not self.tile:
            return exchanges
        return exchanges + 16 + self.products_bytes + (self.tokens or 0) * self.latent_pitch


def _fit(vectors: int, most_threads: int, groups: int = 1) -> Geometry:
    """The smallest cluster of at most `most_threads` threads a CTA that gives each vector a thread
    in each group; if there is none, the largest there is."""
    cluster = groups
    while cluster < MAX_CLUSTER and vectors > cluster // groups * most_threads:
        cluster *= 2
    threads = math.ceil(vectors / (cluster // groups) / WARP) * WARP
    return Geometry(cluster, min(max(threads, 2 * WARP), MAX_THREADS), groups)


def _groups(tp: int, most_ranks: int) -> int:
    """The fewest groups with at most `most_ranks` ranks each: a power of two."""
    groups = 1
    while groups * most_ranks < tp:
        groups *= 2
    return groups


def entries(tp: int, latent: int, hidden: int, op: str = TAIL) -> tuple[Geometry, ...]:
    """The geometries that one cubin is compiled for, for few tokens first.

    Args:
      tp, latent, hidden: sizes of the contract; latent or hidden 0 where that half is absent.
      op: see `KernelVariant`.
    """
    if op == UP_GATHER_ADD:
        # More ranks take larger CTAs, of which the shared memory of capability 12 holds only 16.
        classes = (8, 16, UP_TOKENS) if tp <= 8 else (8, 16)
        return tuple(_product(tp, latent, hidden, tokens) for tokens in classes)
    if op == ALL_GATHER_ADD:
        # Few tokens: spread the ranks over SMs, then their rows. Many: as few SMs as hold the words
        # and the residual of 8 ranks a thread in registers.
        vectors = hidden // tp // VECTOR + 1
        few = _fit(vectors, 256, _groups(tp, math.ceil(tp / 4)))
        many = _fit(vectors, MAX_THREADS, _groups(tp, 8))
        return _few_and_many(few, many)
    # A row and its header. Two vectors a thread are fine for the scatter, which only copies.
    vectors = max(
        latent // VECTOR + 1,
        hidden // tp // VECTOR + 1,
        math.ceil((hidden // VECTOR + tp) / 2),
    )
    few = _fit(vectors, 128)  # spread over SMs until a thread has one vector
    many = _fit(vectors, MAX_THREADS)  # as few SMs as hold it
    return _few_and_many(few, many)


def _product(tp: int, latent: int, hidden: int, tokens: int) -> Geometry:
    """For tiles of the up-projection: a lane for each rank and vector of a tile, of two tokens."""
    threads = 2 * (UP_TILE // VECTOR) * max(8, 1 << (tp - 1).bit_length())
    rows = math.ceil(latent / UP_STEP / (MAX_CLUSTER * threads // WARP)) * UP_STEP
    row_bytes = rows * threads // WARP * 2  # of a CTA's part of a latent
    shape = Geometry(
        MAX_CLUSTER,
        threads,
        tokens=tokens,
        tile=UP_TILE,
        latent_pitch=row_bytes + 96 - row_bytes % 64,  # a step's words lie in different banks
    )
    # Where all tiles fit at once with three CTAs an SM and not with two, fewer registers win (H200,
    # S = 1792: 7.1 us against 8.0 us; otherwise they lose up to 8 %).
    tiles = math.ceil(hidden // tp / UP_TILE)
    if threads == 128 and 22 < tiles <= 34 and 3 * shape.smem_bytes <= SM_SMEM_BYTES:
        return dataclasses.replace(shape, ctas_per_sm=3)
    return shape


def _few_and_many(few: Geometry, many: Geometry) -> tuple[Geometry, ...]:
    if few == many:
        return (many,)
    return (dataclasses.replace(few, tokens=WIDE_FROM_TOKENS - 1), many)


def choose(geometries: tuple[Geometry, ...], tokens: int) -> int:
    """Index into `entries(...)` for a call of `tokens` tokens."""
    for index, geometry in enumerate(geometries):
        if geometry.tokens is None or tokens <= geometry.tokens:
            return index
    raise AssertionError(f"no geometry for {tokens} tokens")


def token_ctas(
    tokens: int,
    *,
    roles: int,
    active_clusters: int,
    sm_count: int,
    channels: int = 1,
    ranks_on_device: int = 1,
    reserved_sms: int = RESERVED_SMS,
    cluster: int = 1,
    untouched_sms: int = 0,
) -> int:
    """gridDim.x of a call: clusters per role, such that all that wait for each other are resident.

    Args:
      tokens: M, or tiles where those take the place of tokens.
      roles: 1 or 2 halves in the launch.
      active_clusters: what the driver says fits at once (cuOccupancyMaxActiveClusters) for this
        kernel, geometry and an empty GPU.
      sm_count: SMs of the device.
      channels: calls that may run at the same time on this device.
      ranks_on_device: ranks that share the device (tests); 1 in production.
      reserved_sms: SMs to leave to other kernels.
      cluster: CTAs per cluster of this geometry.
      untouched_sms: SMs on which no CTA runs while all ranks of the device but one wait, each with
        a CTA on an SM of its own.

    Returns:
      A number in 1..tokens, which a launch may not exceed. Tokens beyond it are served in further
      waves.
    """
    usable = active_clusters * max(sm_count - reserved_sms, 1) // sm_count
    resident = usable // (roles * channels * ranks_on_device)
    if untouched_sms and ranks_on_device > 1:
        waiting = (ranks_on_device - 1) * roles * channels * cluster
        resident = min(resident, (sm_count - untouched_sms) // waiting)
    return max(1, min(tokens, resident))
