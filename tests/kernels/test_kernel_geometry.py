"""Every size of the contract has a geometry, and grids respect what fits on the GPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_latent_tail.kernels import geometry
from jax_latent_tail.kernels.geometry import Geometry
from jax_latent_tail.kernels.variant import (
    ALL_GATHER_ADD,
    UP_GATHER_ADD,
    UP_STEP,
    UP_TILE,
    UP_TOKENS,
    default_matrix,
)
from jax_latent_tail.spec import most_projected_tokens

TP = st.integers(1, 16)
MOST_LATENT = 8192  # more than is served of up_gather_add: `geometry.UP_MAX_LATENT`
# Of dynamic shared memory in one CTA, by compute capability.
SHARED_MEMORY = {"sm_90": 227 << 10, "sm_100f": 227 << 10, "sm_120": 99 << 10}


@st.composite
def sizes(draw):
    tp = draw(TP)
    latent = 8 * draw(st.integers(0, 4096))
    hidden = 8 * tp * draw(st.integers(0 if latent else 1, 1024))
    return tp, latent, hidden


@given(sizes())
def test_entries(size):
    tp, latent, hidden = size
    shapes = geometry.entries(*size)
    assert 1 <= len(shapes) <= 2
    assert len(set(shapes)) == len(shapes)
    most = geometry.MAX_CLUSTER * geometry.MAX_THREADS
    vectors = max(latent // 8 + 1, hidden // tp // 8 + 1)
    for shape in shapes:
        assert shape.lanes >= min(vectors, most), "each vector has a thread, if any geometry has"
        assert shape.smem_bytes <= 48 << 10
        assert shape.smem_bytes >= 16 + 2 * 4 * shape.cluster * shape.warps
        assert shape.partials_bytes % 16 == 0
    # Few tokens never use fewer SMs for a row than many do.
    assert shapes[0].cluster >= shapes[-1].cluster


@given(TP, st.integers(1, 4096))
def test_entries_of_all_gather_add(tp, vectors):
    shapes = geometry.entries(tp, 0, 8 * tp * vectors, ALL_GATHER_ADD)
    assert 1 <= len(shapes) <= 2
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        ranks = -(-tp // shape.groups)  # of a group
        assert ranks <= 8
        assert ranks * (shape.groups - 1) <= 15, "no group begins beyond the table of peers"
        assert ranks * shape.groups <= 16
        most = geometry.MAX_CLUSTER // shape.groups * geometry.MAX_THREADS
        assert shape.lanes >= min(vectors + 1, most)
    assert shapes[0].groups >= shapes[-1].groups


@given(TP, st.integers(1, MOST_LATENT // 8), st.integers(1, 1024))
def test_entries_of_up_gather_add(tp, latent, vectors):
    latent = 8 * latent
    shapes = geometry.entries(tp, latent, 8 * tp * vectors, UP_GATHER_ADD)
    assert [shape.tokens for shape in shapes] == [8, 16, UP_TOKENS][: 3 if tp <= 8 else 2]
    for shape in shapes:
        assert shape.cluster == 8, "a CTA for each token of a group"
        assert shape.tile == UP_TILE
        # A thread for each vector of a tile, of two tokens, for each of the ranks.
        ranks = shape.threads // (2 * UP_TILE // 8)
        assert ranks >= max(tp, 8)
        assert ranks & (ranks - 1) == 0
        assert shape.threads <= geometry.MAX_THREADS
        # The warps have all rows between them, each of its CTA's in shared memory.
        rows = -(-latent // UP_STEP // (shape.cluster * shape.warps)) * UP_STEP
        assert rows * shape.cluster * shape.warps >= latent
        assert shape.latent_pitch >= rows * shape.warps * 2
        assert shape.latent_pitch % 16 == 0
        assert banks_differ(shape.latent_pitch)
        parts = shape.partials_bytes * 2 + shape.products_bytes + shape.tokens * shape.latent_pitch
        assert shape.smem_bytes == 32 + parts
        assert shape.smem_bytes <= SHARED_MEMORY["sm_90"]


def banks_differ(pitch):
    """For 8 bytes of each lane, half a warp at a time: four lanes to a token of `pitch` bytes."""
    for half in (0, 16):
        starts = [lane // 4 * pitch + lane % 4 * 8 for lane in range(half, half + 16)]
        banks = [(start // 4 + word) % 32 for start in starts for word in (0, 1)]
        if len(set(banks)) < 32:
            return False
    return True


@pytest.mark.parametrize(
    ("tp", "shard", "ctas"),
    [
        (4, 1792, 3), (8, 896, 0), (2, 3584, 0),  # of K3
        (4, 22 * 64, 0), (4, 22 * 64 + 8, 3), (4, 34 * 64, 3), (4, 34 * 64 + 8, 0),
        (8, 1792, 3), (9, 1792, 0), (16, 1792, 0),  # larger CTAs
    ],
)  # fmt: skip
def test_when_three_ctas_an_sm_win(tp, shard, ctas):
    shapes = geometry.entries(tp, 3584, tp * shard, UP_GATHER_ADD)
    assert {shape.ctas_per_sm for shape in shapes} == {ctas}
    for shape in shapes if ctas else ():
        # An SM of compute capability 9 has 228 KiB, of which each CTA takes one more.
        assert ctas * (shape.smem_bytes + 1024) <= 228 << 10


def test_shared_memory_of_the_matrix():
    """All that the release carries can be loaded."""
    for variant in default_matrix():
        shapes = geometry.entries(variant.tp, variant.latent, variant.hidden, variant.op)
        assert max(shape.smem_bytes for shape in shapes) <= SHARED_MEMORY[variant.arch], variant


@given(TP, st.integers(1, geometry.UP_MAX_LATENT // 8), st.integers(1, 1024))
def test_what_is_served_of_up_gather_add_has_room_everywhere(tp, latent, vectors):
    shapes = geometry.entries(tp, 8 * latent, 8 * tp * vectors, UP_GATHER_ADD)
    assert max(shape.smem_bytes for shape in shapes) <= min(SHARED_MEMORY.values())


@given(TP, st.integers(1, 1 << 15), st.integers(1, 1 << 15))
def test_a_geometry_serves_the_most_tokens_that_are_projected(tp, latent, shard):
    most = most_projected_tokens(tp, 8 * latent, 8 * shard)
    shapes = geometry.entries(tp, 8 * latent, 8 * tp * shard, UP_GATHER_ADD)
    assert most <= shapes[geometry.choose(shapes, most)].tokens
    assert (most == 1) == (2 * 64 * latent * shard > 16 << 20)


def test_known():
    assert geometry.entries(8, 3584, 7168) == (Geometry(4, 128, tokens=31), Geometry(1, 480))
    assert geometry.entries(2, 8, 0) == (Geometry(1, 64),)
    few, many = geometry.entries(8, 0, 7168, ALL_GATHER_ADD)
    assert (few, many) == (Geometry(4, 128, 4, tokens=31), Geometry(1, 128))
    few, many = geometry.entries(2, 0, 7168, ALL_GATHER_ADD)
    assert (few, many) == (Geometry(4, 256, 2, tokens=31), Geometry(1, 480))
    few, _, many = geometry.entries(8, 3584, 7168, UP_GATHER_ADD)
    assert few == Geometry(8, 128, tokens=8, tile=64, latent_pitch=992)
    assert many == Geometry(8, 128, tokens=32, tile=64, latent_pitch=992)


@given(st.integers(1, 1000))
def test_choose_depends_on_tokens_alone(tokens):
    shapes = geometry.entries(8, 3584, 7168)
    index = geometry.choose(shapes, tokens)
    assert index == (1 if tokens >= geometry.WIDE_FROM_TOKENS else 0)
    assert geometry.choose(geometry.entries(2, 8, 0), tokens) == 0


def test_choose_for_up_gather_add():
    shapes = geometry.entries(8, 3584, 7168, UP_GATHER_ADD)
    chosen = [geometry.choose(shapes, tokens) for tokens in range(1, UP_TOKENS + 1)]
    assert chosen == [0] * 8 + [1] * 8 + [2] * 16
    with pytest.raises(AssertionError, match="33 tokens"):
        geometry.choose(shapes, UP_TOKENS + 1)


@given(
    tokens=st.integers(1, 512),
    roles=st.integers(1, 2),
    active=st.integers(1, 2000),
    sms=st.integers(1, 160),
    channels=st.integers(1, 4),
    ranks=st.integers(1, 16),
    reserved=st.integers(0, 64),
    cluster=st.sampled_from([1, 2, 4, 8]),
    untouched=st.integers(0, 32),
)
def test_token_ctas(tokens, roles, active, sms, channels, ranks, reserved, cluster, untouched):
    ctas = geometry.token_ctas(
        tokens,
        roles=roles,
        active_clusters=active,
        sm_count=sms,
        channels=channels,
        ranks_on_device=ranks,
        reserved_sms=reserved,
        cluster=cluster,
        untouched_sms=untouched,
    )
    assert 1 <= ctas <= tokens
    resident = ctas * roles * channels * ranks
    left = active * max(sms - reserved, 1) / sms
    assert ctas == 1 or resident <= left
    touched = ctas * roles * channels * cluster * (ranks - 1)
    assert ctas == 1 or untouched == 0 or ranks == 1 or touched <= sms - untouched
