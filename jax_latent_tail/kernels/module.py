"""What the compiler is given: all kernels of a variant in one module."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from jax_latent_tail.kernels.collective import AllGatherAdd, Tail
from jax_latent_tail.kernels.geometry import Geometry, entries
from jax_latent_tail.kernels.projection import UpGatherAdd
from jax_latent_tail.kernels.protocol import Protocol
from jax_latent_tail.kernels.variant import ALL_GATHER_ADD, TAIL, UP_GATHER_ADD, KernelVariant

KERNELS = {TAIL: Tail, ALL_GATHER_ADD: AllGatherAdd, UP_GATHER_ADD: UpGatherAdd}


class Module:
    """All geometries of one variant, as one module: what the compiler is given.

    Symbols are `SYMBOL_PREFIX`_0, _1, ... in the order of `geometry.entries`.
    """

    SYMBOL_PREFIX = "latent_tail"

    def __init__(self, variant: KernelVariant, kernel: type[Protocol] | None = None):
        kernel = kernel or KERNELS[variant.op]
        geometries = entries(variant.tp, variant.latent, variant.hidden, variant.op)
        self.kernels = [kernel(variant, geometry) for geometry in geometries]
        kernel.kernel.set_name_prefix(
            self.SYMBOL_PREFIX, remove_cutlass_symbol=True, keep_mangled_name=False
        )

    def residency(self, geometry: Geometry) -> dict[str, int]:
        """What tells the compiler how many registers a thread may have."""
        if not geometry.ctas_per_sm:
            return {}
        # Without a carve-out the compiler would ask the driver.
        return {"min_blocks_per_mp": geometry.ctas_per_sm, "preferred_smem_carveout": 100}

    @cute.jit
    def __call__(
        self, rows: Int64, weights: Int64, indices: Int64, gamma: Int64, latent: Int64,
        shared: Int64, shard: Int64, control: Int64, tokens: Int32, slots: Int32,
        permuted_rows: Int32, top_k: Int32, rank: Int32, roles: Int32, channel: Int32,
        call_hash: Uint32, eps: Float32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Makes the compiler emit the kernels; never called, the product launches the cubin."""
        for each in self.kernels:
            each.kernel(
                rows, weights, indices, gamma, latent, shared, shard, control, tokens, slots,
                permuted_rows, top_k, rank, roles, channel, call_hash, eps,
            ).launch(
                grid=(tokens, each.geometry.cluster, 2),
                block=(each.geometry.threads, 1, 1),
                cluster=(1, each.geometry.cluster, 1),
                smem=each.geometry.smem_bytes,
                stream=stream,
                **self.residency(each.geometry),
            )  # fmt: skip
