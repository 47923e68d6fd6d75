"""The blocks that host and device share, and what may be imported without a compiler."""

import ctypes
import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_latent_tail.errors import ArgumentValueError
from jax_latent_tail.kernels import abi
from jax_latent_tail.kernels.variant import (
    ALL_GATHER_ADD,
    ANY_TOP_K,
    MULTICAST,
    UP_GATHER_ADD,
    UP_TILE,
    UP_TOKENS,
    KernelVariant,
    arch_for,
    default_matrix,
)
from jax_latent_tail.spec import TailSpec, gather_spec


def test_offsets():
    """Also written down in the C++ launcher: a change here is a new ABI version."""
    assert abi.ABI_VERSION == 1

    def offsets(struct):
        return {name: getattr(struct, name).offset for name, _ in struct._fields_}

    assert list(offsets(abi.LaunchParams).values()) == [*range(0, 64, 8), *range(64, 100, 4)]
    assert offsets(abi.Control) == {
        "broken": 0, "closed": 4, "workspace": 8, "multicast": 16, "record": 24, "deadline_ns": 32,
        "claimed": 40, "reserved": 44, "peer_workspace": 128, "peer_broken": 256,
        "reserved_tail": 384,
    }  # fmt: skip
    assert abi.GENERATIONS_OFFSET == 512
    assert offsets(abi.Record) == {
        "code": 0, "role": 4, "wait": 8, "field": 12, "token": 16, "ranks": 20, "generation": 24,
        "got": 28, "expected": 32, "tokens": 36, "channel": 40, "rank": 44, "waited_ns": 48,
        "call_hash": 56, "abi_version": 60,
    }  # fmt: skip
    assert ctypes.sizeof(abi.Record) == 64


@given(tp=st.integers(1, 16), a=st.integers(0, 1000), b=st.integers(0, 200))
def test_a_slot_has_room_for_every_row_and_header(tp, a, b):
    latent, hidden = 8 * a, 8 * tp * b
    slot = abi.Slot(tp, latent, hidden)
    rows = []
    for source in range(tp):
        if latent:
            rows.append((source * slot.routed_pitch, latent * 2 + 16))
        if hidden:
            rows.append((slot.shared_offset + source * slot.shared_pitch, hidden // tp * 2 + 16))
    rows.sort()
    for (begin, size), (following, _) in itertools.pairwise([*rows, (slot.size, 0)]):
        assert begin % 128 == 0
        assert begin + size <= following
    assert abi.workspace_bytes(slot, 128, 2) == slot.size * 2 * 128 * 2


@given(
    tp=st.integers(1, 16), columns=st.integers(1, 300), tokens=st.integers(1, UP_TOKENS),
    channels=st.integers(1, 3),
)  # fmt: skip
def test_the_memory_of_up_gather_add(tp, columns, tokens, channels):
    """A slot and a generation for each tile, whatever the number of tokens."""
    variant = KernelVariant.up_gather_add("sm_90", tp, 64, 8 * tp * columns)
    tiles = variant.slots(tokens)
    assert (tiles - 1) * UP_TILE < variant.shard <= tiles * UP_TILE
    slot = variant.slot
    assert (slot.routed_pitch, slot.shared_offset) == (0, 0)
    assert slot.shared_header == UP_TOKENS * UP_TILE * 2, "behind the columns of every token"
    assert slot.shared_pitch >= slot.shared_header + abi.HEADER_BYTES
    assert slot.shared_pitch % 128 == 0
    size = 2 * channels * tiles * tp * slot.shared_pitch
    assert variant.workspace_bytes(tokens, channels) == size
    assert variant.control_bytes(tokens, channels) == 512 + 4 * 2 * channels * tiles


def test_the_memory_of_the_others():
    """By token: what a launcher allocates for them does not change."""
    for variant in (
        KernelVariant("sm_90", 8, 3584, 7168),
        KernelVariant.all_gather_add("sm_90", 8, 7168),
    ):
        assert variant.slots(33) == 33
        assert variant.control_bytes(33, 2) == 512 + 4 * 2 * 2 * 33
        assert variant.workspace_bytes(33, 2) == variant.slot.size * 2 * 2 * 33


CALL = {
    "op": "fused", "tp": 8, "latent": 3584, "hidden": 7168, "top_k": 0, "fp32_internal": False,
    "eps": 1e-6, "channel": 0, "name": "",
}  # fmt: skip
OTHER = {
    "op": "gather", "tp": 4, "latent": 3592, "hidden": 7232, "top_k": 8, "fp32_internal": True,
    "eps": 1e-5, "channel": 1, "name": "layer",
}  # fmt: skip


@pytest.mark.parametrize("changed", OTHER)
def test_the_hash_tells_calls_apart(changed):
    assert abi.call_hash(**CALL) == abi.call_hash(**CALL)
    assert abi.call_hash(**CALL) != abi.call_hash(**{**CALL, changed: OTHER[changed]})


@pytest.mark.parametrize(("op", "latent"), [(ALL_GATHER_ADD, 0), (UP_GATHER_ADD, 3584)])
def test_the_hash_of_a_gather(op, latent):
    call = {"op": op, "latent": latent, "tp": 8, "hidden": 7168, "residual": True, "channel": 0}
    call["name"] = ""
    other = {
        "op": "gather", "latent": 3592, "tp": 4, "hidden": 7232, "residual": False, "channel": 1,
        "name": "layer",
    }  # fmt: skip
    hashes = [abi.gather_hash(**{**call, name: other[name]}) for name in other]
    assert len({abi.gather_hash(**call), *hashes}) == 1 + len(other)
    assert max(hashes) < abi.SENTINEL


def test_the_hashes_of_the_ops_differ():
    sizes = {"tp": 8, "latent": 3584, "hidden": 7168}
    gathers = {
        abi.gather_hash(op, **sizes, residual=residual)
        for op in (ALL_GATHER_ADD, UP_GATHER_ADD)
        for residual in (False, True)
    }
    assert len(gathers | {abi.call_hash(**CALL)}) == 5


def test_what_travels_for_the_sentinel():
    """Two NaN pairs that are neither each other nor one another's stand-in."""
    assert len({abi.SENTINEL, abi.ESCAPED, abi.OTHER_NAN}) == 3
    for word in (abi.ESCAPED, abi.OTHER_NAN):
        assert all(half & 0x7FFF > 0x7F80 for half in (word & 0xFFFF, word >> 16))


@given(st.floats(0, 1), st.text(max_size=20))
def test_no_header_word_is_the_sentinel(eps, name):
    assert 0 <= abi.call_hash(**{**CALL, "eps": eps, "name": name}) < abi.SENTINEL
    assert abi.GENERATION_MASK < abi.SENTINEL


def test_eps_is_hashed_as_the_kernel_sees_it():
    near = 1e-6 * (1 + 1e-12)
    assert abi.call_hash(**{**CALL, "eps": near}) == abi.call_hash(**CALL)


def test_records_read_as_sentences():
    record = abi.Record(code=abi.DEADLINE, ranks=0b1010, token=3, tokens=8, waited_ns=2 * 10**9)
    assert "no payload from ranks [1, 3] within 2.000 s" in record.describe()
    assert "token 3 of 8" in record.describe()
    record = abi.Record(code=abi.MISMATCH, ranks=1, field=1, got=2, expected=3, wait=1)
    assert "ranks [0] made a different call: tokens is 0x2 there and 0x3 here" in record.describe()
    assert abi.Record().describe() == ""


@pytest.mark.parametrize(
    "variant",
    [*default_matrix()[:8], *default_matrix()[144:148], *default_matrix()[-4:]],
    ids=lambda variant: variant.key,
)
def test_keys_are_one_to_one(variant):
    assert KernelVariant.parse(variant.key) == variant


def test_known_keys():
    """Names of files and cache entries."""
    tail = KernelVariant("sm_90", 8, 3584, 7168)
    assert tail.key == "sm_90-tp8-l3584-h7168-k0-bf16-unicast"
    gather = KernelVariant.all_gather_add("sm_100f", 8, 7168, MULTICAST)
    assert gather.key == "all_gather_add-sm_100f-tp8-l0-h7168-k0-bf16-multicast"
    half = KernelVariant("sm_100f", 8, 0, 7168, publish=MULTICAST)
    assert gather.key != half.key
    up = KernelVariant.up_gather_add("sm_90", 8, 3584, 7168)
    assert up.key == "up_gather_add-sm_90-tp8-l3584-h7168-k0-bf16-unicast"
    assert KernelVariant.parse(up.key) == up != tail


def test_the_default_matrix():
    matrix = default_matrix()
    assert len(matrix) == len({variant.key for variant in matrix}) == 144 + 24 + 24
    for op in (ALL_GATHER_ADD, UP_GATHER_ADD):
        assert sum(variant.op == op for variant in matrix) == 24


@pytest.mark.parametrize(
    "change",
    [
        {"arch": "sm_80"}, {"arch": "hopper"}, {"tp": 0}, {"tp": 17}, {"latent": 12},
        {"hidden": 24}, {"latent": 0, "hidden": 0}, {"top_k": 5}, {"publish": "broadcast"},
        {"op": "gather"}, {"op": ALL_GATHER_ADD},
        {"op": ALL_GATHER_ADD, "latent": 0, "fp32_internal": True},
        {"op": UP_GATHER_ADD, "latent": 0}, {"op": UP_GATHER_ADD, "hidden": 0},
        {"op": UP_GATHER_ADD, "latent": 12}, {"op": UP_GATHER_ADD, "hidden": 24},
        {"op": UP_GATHER_ADD, "top_k": 8}, {"op": UP_GATHER_ADD, "fp32_internal": True},
        {"op": UP_GATHER_ADD, "tp": 17},
    ],
    ids=str,
)  # fmt: skip
def test_a_variant_that_cannot_be_is_refused(change):
    good = {"arch": "sm_90", "tp": 4, "latent": 3584, "hidden": 7168}
    with pytest.raises(ArgumentValueError, match="allowed"):
        KernelVariant(**{**good, **change})


def test_the_variant_of_a_spec():
    spec = TailSpec(
        tp=4, latent_dim=3584, hidden_dim=None, top_k=5, eps=1e-6, fp32_internal=True, max_tokens=8
    )
    variant = KernelVariant.of(spec, "sm_90")
    assert variant == KernelVariant("sm_90", 4, 3584, 0, ANY_TOP_K, True)
    spec = gather_spec(8, 896, True, 128, latent_dim=3584)
    variant = KernelVariant.of(spec, "sm_90", MULTICAST)
    assert variant == KernelVariant.up_gather_add("sm_90", 8, 3584, 7168, MULTICAST)
    assert spec.max_tokens == UP_TOKENS


def test_arch_for():
    assert [arch_for(9, 0), arch_for(10, 0), arch_for(10, 3)] == ["sm_90", "sm_100f", "sm_100f"]
    with pytest.raises(ArgumentValueError, match=r"8\.0"):
        arch_for(8, 0)


def test_nothing_here_needs_a_compiler_or_cuda():
    code = (
        "import sys; from jax_latent_tail.kernels import abi, cubin, geometry, store, variant;"
        "assert not {'cutlass', 'cuda', 'cuda.bindings'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
