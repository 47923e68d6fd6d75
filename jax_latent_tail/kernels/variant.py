"""What is fixed when a kernel is compiled."""

import dataclasses
import re

from jax_latent_tail.errors import ArgumentValueError
from jax_latent_tail.kernels import abi
from jax_latent_tail.spec import MOST_PROJECTED_TOKENS, TailSpec

ANY_TOP_K = -1
# K that have their own class, with wide loads of a token's indices and weights.
WIDE_TOP_K = (8, 16)
TOP_K_CLASSES = (0, *WIDE_TOP_K, ANY_TOP_K)

UNICAST, MULTICAST = "unicast", "multicast"

# What a kernel does: the tail or one half of it, `all_gather_add`, or the same of columns that it
# first computes by the up-projection.
TAIL, ALL_GATHER_ADD, UP_GATHER_ADD = "tail", "all_gather_add", "up_gather_add"
OPS = (TAIL, ALL_GATHER_ADD, UP_GATHER_ADD)

# In up_gather_add: most tokens of a call, columns that a cluster computes at a time, rows of the
# stripe that a warp multiplies at a time.
UP_TOKENS, UP_TILE, UP_STEP = MOST_PROJECTED_TOKENS, 64, 16


@dataclasses.dataclass(frozen=True, order=True)
class KernelVariant:
    """One cubin. Role, rank, M, P, eps, deadline, channel and grid are run-time.

    Attributes:
      arch: what the compiler calls the target, e.g. "sm_90", "sm_100f".
      tp: ranks in the group, 1..16.
      latent: L, a multiple of 8; 0 compiles no routed half, and in all_gather_add there is none. In
        up_gather_add rows of the up-projection.
      hidden: H, a multiple of 8 * tp; 0 compiles no shared half.
      top_k: the class of K: 0 for finalized rows, 8, 16, or ANY_TOP_K for a run-time K.
      fp32_internal: see `TailSpec`.
      publish: how rows for all reach the peers, UNICAST (one store a peer) or MULTICAST (one
        multimem.st). The reduce-scatter half sends different data to each peer, always unicast.
      trigger: let a PDL-aware successor start once this call's rows are published. Never for ranks
        that share a GPU: the successor's CTAs hold the SMs that a peer needs.
      op: one of OPS. In the gathers a residual is optional at run time.
    """

    arch: str
    tp: int
    latent: int
    hidden: int
    top_k: int = 0
    fp32_internal: bool = False
    publish: str = UNICAST
    trigger: bool = False
    op: str = TAIL

    def __post_init__(self) -> None:
        def need(ok: bool, argument: str, allowed: str) -> None:
            if not ok:
                raise ArgumentValueError(argument, getattr(self, argument), allowed)

        match = re.fullmatch(r"sm_(\d+)[af]?", self.arch)
        need(
            match is not None and int(match[1]) >= 90,
            "arch",
            "sm_90 or later, e.g. 'sm_90', 'sm_100f'",
        )
        need(1 <= self.tp <= abi.MAX_RANKS, "tp", f"1..{abi.MAX_RANKS}")
        need(self.latent >= 0 and self.latent % 8 == 0, "latent", "a multiple of 8, or 0")
        need(
            self.hidden >= 0 and self.hidden % (8 * self.tp) == 0,
            "hidden",
            f"a multiple of 8 * tp = {8 * self.tp}, or 0",
        )
        need(self.latent > 0 or self.hidden > 0, "latent", "positive, when hidden is 0")
        need(self.top_k in TOP_K_CLASSES, "top_k", f"one of the classes {TOP_K_CLASSES}")
        need(self.top_k == 0 or self.latent > 0, "top_k", "0, when latent is 0")
        need(self.publish in (UNICAST, MULTICAST), "publish", f"{UNICAST!r} or {MULTICAST!r}")
        need(self.op in OPS, "op", f"one of {OPS}")
        if self.op == ALL_GATHER_ADD:
            need(self.latent == 0, "latent", "0 in all_gather_add")
        if self.op == UP_GATHER_ADD:
            need(self.latent > 0, "latent", "positive in up_gather_add")
            need(self.hidden > 0, "hidden", "positive in up_gather_add")
            need(not self.trigger, "trigger", "False in up_gather_add")
        if self.op != TAIL:
            need(self.top_k == 0, "top_k", f"0 in {self.op}")
            need(not self.fp32_internal, "fp32_internal", f"False in {self.op}")

    @classmethod
    def of(cls, spec: TailSpec, arch: str, publish: str = UNICAST) -> "KernelVariant":
        """The variant that serves a call of `spec`."""
        top_k = spec.top_k or 0
        return cls(
            arch=arch,
            tp=spec.tp,
            latent=spec.latent_dim or 0,
            hidden=spec.hidden_dim or 0,
            top_k=top_k if top_k in TOP_K_CLASSES else ANY_TOP_K,
            fp32_internal=spec.fp32_internal,
            publish=publish,
            op=spec.op if spec.gathers else TAIL,
        )

    @classmethod
    def all_gather_add(
        cls, arch: str, tp: int, hidden: int, publish: str = UNICAST, trigger: bool = False
    ) -> "KernelVariant":
        """The variant for results [M, hidden]."""
        return cls(arch, tp, 0, hidden, publish=publish, trigger=trigger, op=ALL_GATHER_ADD)

    @classmethod
    def up_gather_add(
        cls, arch: str, tp: int, latent: int, hidden: int, publish: str = UNICAST
    ) -> "KernelVariant":
        """The variant for results [M, hidden] of an up-projection of `latent` columns."""
        return cls(arch, tp, latent, hidden, publish=publish, op=UP_GATHER_ADD)

    @property
    def shard(self) -> int:
        """S, columns of the shared output that one rank keeps; in the gathers, that it has."""
        return self.hidden // self.tp

    @property
    def slot(self) -> abi.Slot:
        """What a workspace holds for one token; in up_gather_add for one tile of all tokens."""
        if self.op == UP_GATHER_ADD:
            return abi.Slot(self.tp, 0, self.tp * UP_TOKENS * UP_TILE)
        return abi.Slot(self.tp, self.latent, self.hidden)

    def slots(self, tokens: int) -> int:
        """How many of them there are for so many tokens, each with a generation of its own."""
        return -(-self.shard // UP_TILE) if self.op == UP_GATHER_ADD else tokens

    def control_bytes(self, max_tokens: int, channels: int = 1) -> int:
        """Bytes of one rank's control block."""
        return abi.control_bytes(self.slots(max_tokens), channels)

    def workspace_bytes(self, max_tokens: int, channels: int = 1) -> int:
        """Bytes of one rank's workspace."""
        return abi.workspace_bytes(self.slot, self.slots(max_tokens), channels)

    @property
    def key(self) -> str:
        """A name for files and logs, one to one with the variant."""
        k = "any" if self.top_k == ANY_TOP_K else self.top_k
        parts = [self.op] if self.op != TAIL else []
        parts += [self.arch, f"tp{self.tp}", f"l{self.latent}", f"h{self.hidden}", f"k{k}"]
        parts += ["fp32" if self.fp32_internal else "bf16", self.publish]
        return "-".join(parts + ["trigger"] * self.trigger)

    @classmethod
    def parse(cls, key: str) -> "KernelVariant":
        """The variant whose `key` this is."""
        match = re.fullmatch(
            r"(?:(all_gather_add|up_gather_add)-)?(sm_\d+[af]?)-tp(\d+)-l(\d+)-h(\d+)-k(\d+|any)-(fp32|bf16)"
            r"-(unicast|multicast)(-trigger)?",
            key,
        )
        if not match:
            raise ArgumentValueError(
                "spec", repr(key), "a key like 'sm_90-tp8-l3584-h7168-k0-bf16-unicast'"
            )
        op, arch, tp, latent, hidden, top_k, rounding, publish, trigger = match.groups()
        return cls(
            arch=arch,
            tp=int(tp),
            latent=int(latent),
            hidden=int(hidden),
            top_k=ANY_TOP_K if top_k == "any" else int(top_k),
            fp32_internal=rounding == "fp32",
            publish=publish,
            trigger=bool(trigger),
            op=op or TAIL,
        )


def arch_for(major: int, minor: int) -> str:
    """The arch of the default matrix that runs on a device of this compute capability."""
    served = {9: "sm_90", 10: "sm_100f", 12: "sm_120"}
    if major not in served:
        raise ArgumentValueError(
            "device", f"of compute capability {major}.{minor}", "9.x, 10.x or 12.x"
        )
    return served[major]


def default_matrix() -> list[KernelVariant]:
    """What the release carries: Kimi K3's sizes for every supported arch."""
    archs, ranks, publishes = ("sm_90", "sm_100f", "sm_120"), (2, 4, 8, 16), (UNICAST, MULTICAST)
    tails = [
        KernelVariant(arch, tp, 3584, 7168, top_k, fp32_internal, publish)
        for arch in archs
        for tp in ranks
        for top_k in (0, *WIDE_TOP_K)
        for fp32_internal in (False, True)
        for publish in publishes
    ]
    gathers = [
        KernelVariant.all_gather_add(arch, tp, 7168, publish)
        for arch in archs
        for tp in ranks
        for publish in publishes
    ]
    up = [
        KernelVariant.up_gather_add(arch, tp, 3584, 7168, publish)
        for arch in archs
        for tp in ranks
        for publish in publishes
    ]
    return tails + gathers + up
