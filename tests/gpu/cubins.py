"""Compile, without a GPU, every cubin that the GPU tests load: python tests/gpu/cubins.py DIR"""

import pathlib
import sys

from jax_latent_tail.kernels import export
from jax_latent_tail.kernels.variant import ANY_TOP_K, KernelVariant

SIZES = [(1, 3584, 7168), (3, 8, 24), (3, 1536, 6144), (6, 2048, 5040), (5, 4104, 40)]
SIZES += [(2, 8192, 16384), (4, 3584, 0), (4, 0, 7168)]
GATHER_SIZES = [(1, 7168), (2, 7168), (4, 7168), (8, 7168)]
STRIPES = [(1, 896), (1, 1792), (1, 3584)]  # of jax_stripe.py: (ranks, columns)
GATHER_SIZES += [*STRIPES, (3, 24), (5, 40), (6, 5040), (2, 65536)]
UP_SIZES = [(tp, 3584, 7168) for tp in (1, 2, 4, 8)] + [(tp, 3584, h) for tp, h in STRIPES]
UP_SIZES += [(3, 520, 600), (5, 8, 40), (6, 7168, 6144)]
EXAMPLE = (128, 256)  # of examples/kimi_moe.py


def variants(arch: str) -> list[KernelVariant]:
    k3 = (3584, 7168)
    found = [KernelVariant(arch, tp, *k3, 0, f) for tp in (2, 4, 8) for f in (False, True)]
    found += [KernelVariant(arch, *sizes) for sizes in [*SIZES, (2, 3584, 0), (2, 0, 7168)]]
    classes = [
        (8, 16),
        (4, 8),
        (2, 16),
        (2, 8),
        (8, ANY_TOP_K),
        (2, ANY_TOP_K),
        (4, 16),
        (8, 8),
        (1, 8),
    ]
    found += [KernelVariant(arch, tp, *k3, top_k) for tp, top_k in classes]
    found += [KernelVariant(arch, 4, *k3, 8, True), KernelVariant(arch, 1, *k3, 0, True)]
    found.append(KernelVariant(arch, 2, *k3, trigger=True))
    found += [KernelVariant.all_gather_add(arch, *sizes) for sizes in GATHER_SIZES]
    found.append(KernelVariant.all_gather_add(arch, 2, 7168, trigger=True))
    found += [KernelVariant.up_gather_add(arch, *sizes) for sizes in UP_SIZES]
    for tp in (1, 2, 4, 8):
        found.append(KernelVariant(arch, tp, *EXAMPLE, ANY_TOP_K))
        found.append(KernelVariant.all_gather_add(arch, tp, EXAMPLE[1]))
        found.append(KernelVariant.up_gather_add(arch, tp, *EXAMPLE))
    return found


if __name__ == "__main__":
    arch = sys.argv[2] if len(sys.argv) > 2 else "sm_90"
    export.export(pathlib.Path(sys.argv[1]), variants(arch), jobs=2)
