"""The tail of a latent MoE layer as one operation for jit(shard_map) programs.

import jax_latent_tail as latent_tail
"""

from jax_latent_tail.api import (
    Unfinalized,
    all_gather_add,
    all_reduce_rms_norm,
    fused,
    moe_tail,
    reduce_scatter,
)
from jax_latent_tail.choice import Choice
from jax_latent_tail.errors import (
    ArgumentError,
    ArgumentTypeError,
    ArgumentValueError,
    CommunicatorError,
    DisagreementError,
    LatentTailError,
    RendezvousError,
    UnavailableError,
)
from jax_latent_tail.lifecycle import check, close, compiler_options, explain, prepare, reset
from jax_latent_tail.version import __version__ as __version__

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "Choice",
    "CommunicatorError",
    "DisagreementError",
    "LatentTailError",
    "RendezvousError",
    "UnavailableError",
    "Unfinalized",
    "all_gather_add",
    "all_reduce_rms_norm",
    "check",
    "close",
    "compiler_options",
    "explain",
    "fused",
    "moe_tail",
    "prepare",
    "reduce_scatter",
    "reset",
]
