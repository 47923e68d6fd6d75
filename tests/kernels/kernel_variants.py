"""The variants that the kernel tests compile: a few that cover every choice, and the matrix."""

from jax_latent_tail.kernels.variant import (
    ANY_TOP_K,
    MULTICAST,
    KernelVariant,
    default_matrix,
)

K3 = (3584, 7168)

CHOSEN = [
    KernelVariant("sm_90", 2, *K3),
    KernelVariant("sm_90", 4, *K3, fp32_internal=True),
    KernelVariant("sm_90", 8, *K3, 16),
    KernelVariant("sm_90", 8, *K3, publish=MULTICAST),
    KernelVariant("sm_90", 16, *K3, 8, fp32_internal=True),
    KernelVariant("sm_90", 2, *K3, ANY_TOP_K),
    KernelVariant("sm_90", 2, *K3, trigger=True),
    KernelVariant("sm_90", 6, 2048, 5040),
    KernelVariant("sm_90", 4, 3584, 0, publish=MULTICAST),
    KernelVariant("sm_90", 4, 0, 7168),
    KernelVariant("sm_100f", 8, *K3, 8, publish=MULTICAST),
    KernelVariant("sm_120", 4, *K3),
    KernelVariant.all_gather_add("sm_90", 2, 7168),
    KernelVariant.all_gather_add("sm_90", 8, 7168),
    KernelVariant.all_gather_add("sm_90", 8, 7168, MULTICAST),
    KernelVariant.all_gather_add("sm_90", 16, 7168, trigger=True),
    KernelVariant.all_gather_add("sm_90", 6, 5040),
    KernelVariant.all_gather_add("sm_90", 2, 65536, MULTICAST),  # several vectors a thread
    KernelVariant.all_gather_add("sm_100f", 4, 7168, MULTICAST),
    KernelVariant.all_gather_add("sm_120", 16, 7168),
    KernelVariant.up_gather_add("sm_90", 1, *K3),
    KernelVariant.up_gather_add("sm_90", 2, *K3),
    KernelVariant.up_gather_add("sm_90", 4, *K3),  # for three CTAs an SM
    KernelVariant.up_gather_add("sm_90", 8, *K3, MULTICAST),
    KernelVariant.up_gather_add("sm_90", 16, *K3),
    KernelVariant.up_gather_add("sm_90", 3, 520, 600),
    KernelVariant.up_gather_add("sm_90", 5, 8, 40),
    KernelVariant.up_gather_add("sm_90", 6, 7168, 6144),  # a stripe in several passes
    KernelVariant.up_gather_add("sm_100f", 8, *K3, MULTICAST),
    KernelVariant.up_gather_add("sm_120", 4, *K3),
]

MATRIX = default_matrix()
