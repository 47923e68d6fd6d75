"""The static description of one call of the tail, shared by every layer of the package.

Names used throughout: M tokens, L latent_dim, H hidden_dim, tp group size, S = H / tp shard_dim,
K top_k, P rows of unreduced expert output.
"""

import dataclasses
import struct
from typing import Any, NamedTuple

from jax_latent_tail.errors import ArgumentValueError

# Mesh axes of a group, major first: a rank is its position in row-major order.
AxisName = tuple[str, ...]

# Tokens a native workspace has room for unless the caller says otherwise: a decode step's.
DEFAULT_MAX_TOKENS = 128

# Most tokens for which there is a native call that also computes the up-projection.
MOST_PROJECTED_TOKENS = 32

# What `implementation=` may be: None chooses, "xla" means plain collectives.
IMPLEMENTATIONS = (None, "xla", "cpu", "cuda")


class Operands(NamedTuple):
    """The arrays of one call in the order the primitive takes them; None where there is none."""

    rows: Any = None  # [M, L], or [P, L] where the call finalizes expert rows
    weights: Any = None  # [M, K]
    indices: Any = None  # [M, K]
    gamma: Any = None  # [L]
    shared: Any = None  # [M, H]

    def present(self) -> tuple[Any, ...]:
        return tuple(operand for operand in self if operand is not None)


def _as_fp32(value: float) -> float:
    """The shortest decimal number that fp32 rounds as it does `value`.

    So numbers are equal here when they are to the handlers, which find their communicator by fp32.
    """
    packed = struct.pack("f", value)
    (rounded,) = struct.unpack("f", packed)
    texts = (f"{rounded:.{digits}g}" for digits in range(1, 10))
    return next(float(text) for text in texts if struct.pack("f", float(text)) == packed)


@dataclasses.dataclass(frozen=True)
class TailSpec:
    """Sizes, rounding and limits of one call; hashable, and equal on every rank of a group.

    Made for every call of the package: for `fused` and its halves, and by `gather_spec` for
    `all_gather_add` and for the up-projection that ends in one.

    Attributes:
      tp: ranks in the group.
      latent_dim: L, columns of the routed half, or rows of an up-projection; None where the call
        has neither.
      hidden_dim: H, columns of the shared half, a multiple of tp; None where it has none.
      top_k: K, expert rows per token that the routed half finalizes; None where the routed rows
        come finalized.
      eps: added to the mean square before the reciprocal square root; rounded to fp32.
      fp32_internal: False rounds the reduced row and its squares to bf16 before the row sum, True
        keeps both in fp32.
      max_tokens: tokens that a native implementation keeps room for.
      gathers: the call is an `all_gather_add` of rows that are hidden_dim columns wide together;
        with a latent_dim, of those that it computes by the up-projection.
      has_residual: whether that adds a residual.
    """

    tp: int
    latent_dim: int | None
    hidden_dim: int | None
    top_k: int | None
    eps: float
    fp32_internal: bool
    max_tokens: int
    gathers: bool = False
    has_residual: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", _as_fp32(self.eps))
        if self.hidden_dim is not None and self.hidden_dim % self.tp:
            raise ArgumentValueError(
                "shared",
                f"{self.hidden_dim} columns wide",
                f"a multiple of the {self.tp} ranks it is scattered over",
            )

    def __str__(self) -> str:
        sizes = {"latent_dim": self.latent_dim, "hidden_dim": self.hidden_dim, "top_k": self.top_k}
        said = [f"{name} {size}" for name, size in sizes.items() if size is not None]
        if self.latent_dim is not None and not self.gathers:
            said += [f"eps {self.eps:g}"] + ["fp32_internal"] * self.fp32_internal
        said += ["residual"] * self.has_residual
        return f"{self.op} on {self.tp} ranks ({', '.join(said)}, max_tokens {self.max_tokens})"

    @property
    def projects(self) -> bool:
        """Whether the call computes by the up-projection what it gathers."""
        return self.gathers and self.latent_dim is not None

    @property
    def op(self) -> str:
        """The public function that makes this call; "up_gather_add" is made by `moe_tail`."""
        if self.gathers:
            return "up_gather_add" if self.projects else "all_gather_add"
        if self.latent_dim is None:
            return "reduce_scatter"
        return "all_reduce_rms_norm" if self.hidden_dim is None else "fused"

    @property
    def shard_dim(self) -> int:
        """S, the columns of the shared half that each rank keeps."""
        assert self.hidden_dim is not None
        return self.hidden_dim // self.tp

    def operands(self, *arrays: Any) -> Operands:
        """Names the arrays that `Operands.present` listed for a call of this description."""
        names: tuple[str, ...] = ()
        if self.latent_dim is not None:
            names += ("rows",) if self.top_k is None else ("rows", "weights", "indices")
            names += ("gamma",)
        if self.hidden_dim is not None:
            names += ("shared",)
        return Operands(**dict(zip(names, arrays, strict=True)))

    def routed_tokens(self, operands: Operands) -> Any:
        """The operand with one row per token in the routed half, which expert rows have not."""
        return operands.rows if self.top_k is None else operands.indices


def most_projected_tokens(tp: int, latent_dim: int, shard_dim: int) -> int:
    """Most tokens for which that call is taken; for more, XLA's product and a gather.

    Where it wins on an H200 (docs/benchmarks.md): there XLA reads the large stripes of two ranks as
    fast, save for a single token. With more than 8 ranks there is no room for more than 16 tokens.
    """
    if 2 * latent_dim * shard_dim > 16 << 20:
        return 1
    return MOST_PROJECTED_TOKENS if tp <= 8 else 16


def gather_spec(
    tp: int, shard_dim: int, has_residual: bool, max_tokens: int, latent_dim: int | None = None
) -> TailSpec:
    """The description of an `all_gather_add` of rows [M, shard_dim] of each rank.

    Args:
      latent_dim: L, where the call computes these rows from the latent.
    """
    if latent_dim is not None:
        max_tokens = min(max_tokens, most_projected_tokens(tp, latent_dim, shard_dim))
    return TailSpec(
        tp=tp,
        latent_dim=latent_dim,
        hidden_dim=tp * shard_dim,
        top_k=None,
        eps=1.0,  # nothing is normalised
        fp32_internal=False,
        max_tokens=max_tokens,
        gathers=True,
        has_residual=has_residual,
    )
