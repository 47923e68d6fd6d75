"""The binary interface of the kernels: what the host and the device agree on, byte for byte.

Three blocks of memory and one parameter list. All integers are little-endian, every field has its
natural alignment. A change of any of them is a new `ABI_VERSION`; a cubin of another version is
refused.

* **Workspace** (symmetric: same size on every rank, mapped by every peer). Where partial rows
  arrive. `channels` independent channels, each holding for both buffers and every token a `Slot`:

      [channel][buffer 0..1][token]: routed [tp] x (row [L] bf16, header 16 bytes, padding)
                                     shared [tp] x (row [S] bf16, header 16 bytes, padding)

  with the padding to a multiple of 128 bytes each, and the index in [tp] the source rank. In
  up_gather_add the place of a token is taken by a tile of columns, of which a shared row holds
  those of every token, [UP_TOKENS, UP_TILE].

  All of it holds the 32-bit word `SENTINEL` when nothing is in flight.

* **Control block** (device memory of one rank; peers map it to write one word of it). Its address
  is a kernel parameter, baked into captured graphs: it stays valid as long as the process, also
  after the communicator is closed. `Control`, then one generation word per
  (channel, role, token), all zero at the start.

* **Record** (memory that the host reads while kernels run, say pinned and mapped). `Record`, all
  zero until the first failure, written once, `code` last. Lives as long as the control block.

A *reset* (all ranks drain, meet, refill, drain, meet) fills the workspace with `SENTINEL` and
zeroes the generation words, `Control.broken`, `Control.claimed` and the record.
"""

import ctypes
import dataclasses
import hashlib

ABI_VERSION = 1

# The word that means "nothing has arrived". As two bf16 it is (+0, -0); a payload word equal to it
# is published as (+0, +0), which changes no sum that starts from +0.
SENTINEL = 0x80000000
# Where words are copied, it travels as this pair of NaNs instead, and that pair as the other.
ESCAPED, OTHER_NAN = 0xFFA5FFA5, 0x7FFF7FFF

MAX_RANKS = 16
BUFFERS = 2

ROUTED, SHARED = 0, 1  # a role: the index of a generation word
TILES = 2  # in a record in place of SHARED, where tiles have the place of tokens
ROUTED_MASK, SHARED_MASK = 1 << ROUTED, 1 << SHARED
BOTH_MASK = ROUTED_MASK | SHARED_MASK

HEADER_BYTES = 16
# A header's words, in order. None is ever the sentinel: the top bit of each stays clear.
HEADER_FIELDS = ("call hash", "tokens", "generation", "reserved")
GENERATION_MASK = 0x7FFFFFFF

# `Record.code`, and the low byte of `Control.broken`.
CODES = {
    0: "none",
    1: "deadline",  # a wait outlasted `Control.deadline_ns`
    2: "mismatch",  # a peer's header disagrees with this call
    3: "told",  # a peer failed and told this rank
}
DEADLINE, MISMATCH, TOLD = 1, 2, 3

# `Record.wait`
PAYLOAD_WAIT, HEADER_WAIT = 0, 1


class LaunchParams(ctypes.Structure):
    """The kernels' parameter list. Pointers are device addresses, 16-byte aligned.

    Of the arrays only those of the roles in `roles` are read or written. `all_gather_add` has a
    communicator of its own, with a `Slot` of latent 0 and the shared role. It uses `shared` for x
    [M, S], `rows` for the residual [M, H] or 0 for none, `shard` for the output [M, H], and of the
    other words those that say which call it is. `up_gather_add` is like it; of what it projects
    `latent` is [M, L] and `weights` the stripe [L, S].
    """

    _fields_ = [
        ("rows", ctypes.c_uint64),  # bf16 [M, L]; with a finalize, [P, L]
        ("weights", ctypes.c_uint64),  # bf16 [M, K]; unused without a finalize
        ("indices", ctypes.c_uint64),  # int32 [M, K]; unused without a finalize
        ("gamma", ctypes.c_uint64),  # bf16 [L]
        ("latent", ctypes.c_uint64),  # out, bf16 [M, L]
        ("shared", ctypes.c_uint64),  # bf16 [M, H]
        ("shard", ctypes.c_uint64),  # out, bf16 [M, S]
        ("control", ctypes.c_uint64),  # this rank's control block
        ("tokens", ctypes.c_int32),  # M, 1..max_tokens
        ("slots", ctypes.c_int32),  # in a buffer, same on every rank: max_tokens, or tiles
        ("permuted_rows", ctypes.c_int32),  # P, 0..2^31-1
        ("top_k", ctypes.c_int32),  # K; read by variants of any K only
        ("rank", ctypes.c_int32),  # 0..tp-1
        ("roles", ctypes.c_int32),  # ROUTED_MASK, SHARED_MASK or BOTH_MASK
        ("channel", ctypes.c_int32),  # 0..channels-1
        ("call_hash", ctypes.c_uint32),  # `call_hash(...)`, below 2^31
        ("eps", ctypes.c_float),
    ]


class Control(ctypes.Structure):
    """The head of the control block; generation words follow at `GENERATIONS_OFFSET`."""

    _fields_ = [
        (
            "broken",
            ctypes.c_uint32,
        ),  # nonzero: failed. Set by own and peers' kernels and the host
        ("closed", ctypes.c_uint32),  # nonzero: the communicator is gone. Only the host sets it
        ("workspace", ctypes.c_uint64),  # this rank's workspace; one load with the two words above
        ("multicast", ctypes.c_uint64),  # the group's multicast mapping of all workspaces, or 0
        ("record", ctypes.c_uint64),  # device address of this rank's `Record`
        ("deadline_ns", ctypes.c_uint64),  # how long one wait may last
        ("claimed", ctypes.c_uint32),  # nonzero: somebody writes or wrote the record
        ("reserved", ctypes.c_uint32 * 21),
        # Per rank p, as mapped here; entry `rank` is this rank's own.
        ("peer_workspace", ctypes.c_uint64 * MAX_RANKS),
        ("peer_broken", ctypes.c_uint64 * MAX_RANKS),  # address of p's `Control.broken`; 0: unknown
        ("reserved_tail", ctypes.c_uint32 * 32),
    ]


class Record(ctypes.Structure):
    """What ended the first wait that failed on this rank."""

    _fields_ = [
        ("code", ctypes.c_uint32),  # key of CODES; written last, with release order
        ("role", ctypes.c_uint32),  # ROUTED, SHARED or TILES
        ("wait", ctypes.c_uint32),  # PAYLOAD_WAIT or HEADER_WAIT
        ("field", ctypes.c_uint32),  # mismatch: index into HEADER_FIELDS
        ("token", ctypes.c_uint32),  # or the first tile of the cluster that found it
        ("ranks", ctypes.c_uint32),  # bit p: rank p is missing, disagrees, or (told) told us
        ("generation", ctypes.c_uint32),  # of this (role, token) on this rank
        ("got", ctypes.c_uint32),  # mismatch: the peer's word
        ("expected", ctypes.c_uint32),  # mismatch: this rank's word
        ("tokens", ctypes.c_uint32),  # M of the call
        ("channel", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),  # the rank that wrote this record
        ("waited_ns", ctypes.c_uint64),  # deadline: the wait lasted at least this long
        ("call_hash", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
    ]

    def describe(self) -> str:
        """One sentence for an error message; empty while nothing has failed."""
        if not self.code:
            return ""
        ranks = [p for p in range(MAX_RANKS) if self.ranks >> p & 1]
        if self.role == TILES:
            place = f"{self.tokens} tokens, columns from tile {self.token} on"
        else:
            half = ("routed", "shared")[self.role]
            place = f"{half} half, token {self.token} of {self.tokens}"
        where = f"rank {self.rank}, {place}, generation {self.generation}, channel {self.channel}"
        if self.code == DEADLINE:
            what = ("payload", "header")[self.wait]
            return f"no {what} from ranks {ranks} within {self.waited_ns / 1e9:.3f} s ({where})"
        if self.code == MISMATCH:
            return (
                f"ranks {ranks} made a different call: {HEADER_FIELDS[self.field]} is "
                f"{self.got:#x} there and {self.expected:#x} here ({where})"
            )
        return f"ranks {ranks} failed and told this one ({where})"


GENERATIONS_OFFSET = ctypes.sizeof(Control)


def parameter_layout() -> tuple[tuple[int, int], ...]:
    """(offset, size) in bytes of each kernel parameter."""
    descriptors = [getattr(LaunchParams, field[0]) for field in LaunchParams._fields_]
    return tuple((descriptor.offset, descriptor.size) for descriptor in descriptors)


def _check_layout() -> None:
    assert ctypes.sizeof(LaunchParams) == 104
    assert LaunchParams.eps.offset == 96
    assert Control.peer_workspace.offset == 128
    assert GENERATIONS_OFFSET == 512
    assert ctypes.sizeof(Record) == 64


_check_layout()


def control_bytes(slots: int, channels: int = 1) -> int:
    """Bytes of one rank's control block, generation words included."""
    return GENERATIONS_OFFSET + 4 * channels * 2 * slots


@dataclasses.dataclass(frozen=True)
class Slot:
    """Byte offsets in the slot of one token: source p's routed row is at p * routed_pitch.

    `latent` or `hidden` is 0 where that half does not exist; it then takes no room.
    """

    tp: int
    latent: int
    hidden: int

    @staticmethod
    def _pitch(columns: int) -> int:
        return -(-(columns * 2 + HEADER_BYTES) // 128) * 128 if columns else 0

    @property
    def routed_pitch(self) -> int:
        """From one source's routed row to the next."""
        return self._pitch(self.latent)

    @property
    def routed_header(self) -> int:
        """Of the header in a routed row, which it follows."""
        return self.latent * 2

    @property
    def shared_offset(self) -> int:
        """Of source 0's shared row."""
        return self.tp * self.routed_pitch

    @property
    def shared_pitch(self) -> int:
        """From one source's shared row to the next."""
        return self._pitch(self.hidden // self.tp)

    @property
    def shared_header(self) -> int:
        """Of the header in a shared row, which it follows."""
        return self.hidden // self.tp * 2

    @property
    def size(self) -> int:
        """Of the slot."""
        return self.shared_offset + self.tp * self.shared_pitch


def workspace_bytes(slot: Slot, slots: int, channels: int = 1) -> int:
    """Bytes of one rank's workspace with so many slots in each buffer."""
    return slot.size * BUFFERS * slots * channels


def call_hash(
    op: str,
    *,
    tp: int,
    latent: int,
    hidden: int,
    top_k: int,
    fp32_internal: bool,
    eps: float,
    channel: int = 0,
    name: str = "",
) -> int:
    """31 bits of everything that must be equal on all ranks, M aside, for the header.

    `top_k` is 0 where the rows come finalized; `name` is the caller's own label of the call site.
    """
    text = repr(
        (ABI_VERSION, op, tp, latent, hidden, top_k, bool(fp32_internal))
        + (ctypes.c_float(eps).value.hex(), channel, name)
    )
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & GENERATION_MASK


def gather_hash(
    op: str,
    *,
    tp: int,
    latent: int,
    hidden: int,
    residual: bool,
    channel: int = 0,
    name: str = "",
) -> int:
    """`call_hash` of an `all_gather_add` or `up_gather_add`; `residual`: whether there is one."""
    return call_hash(
        f"{op} with residual" if residual else op,
        tp=tp, latent=latent, hidden=hidden, top_k=0, fp32_internal=False, eps=0.0,
        channel=channel, name=name,
    )  # fmt: skip
