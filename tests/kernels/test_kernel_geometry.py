"""Every size of the contract has a geometry, and grids respect what fits on the GPU."""

from hypothesis import given
from hypothesis import strategies as st

from jax_latent_tail.kernels import geometry
from jax_latent_tail.kernels.geometry import Geometry
from jax_latent_tail.kernels.variant import ALL_GATHER_ADD

TP = st.integers(1, 16)


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


def test_known():
    assert geometry.entries(8, 3584, 7168) == (Geometry(4, 128), Geometry(1, 480))
    assert geometry.entries(2, 8, 0) == (Geometry(1, 64),)
    few, many = geometry.entries(8, 0, 7168, ALL_GATHER_ADD)
    assert (few, many) == (Geometry(4, 128, 4), Geometry(1, 128))
    few, many = geometry.entries(2, 0, 7168, ALL_GATHER_ADD)
    assert (few, many) == (Geometry(4, 256, 2), Geometry(1, 480))


@given(st.integers(1, 1000))
def test_choose_depends_on_tokens_alone(tokens):
    shapes = geometry.entries(8, 3584, 7168)
    index = geometry.choose(shapes, tokens)
    assert index == (1 if tokens >= geometry.WIDE_FROM_TOKENS else 0)
    assert geometry.choose(shapes[:1], tokens) == 0


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
