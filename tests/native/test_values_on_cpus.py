"""The native calls on CPUs against the oracle, and bit for bit against the reference."""

import functools

import harness
import jax
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P
from ml_dtypes import bfloat16

import jax_latent_tail as latent_tail
from jax_latent_tail import choice, native
from jax_latent_tail.spec import gather_spec

SHAPES = [  # tp, M, L, H / tp
    (1, 3, 8, 8),
    (2, 1, 3584, 3584),
    (2, 8, 3584, 3584),
    (3, 7, 40, 8),
    (8, 1, 56, 16),
    (8, 13, 1032, 264),
    (8, 128, 64, 40),
]


def contributions(inputs):
    if inputs.indices is None:
        return inputs.rows
    ranks = zip(inputs.rows, inputs.weights, inputs.indices, strict=True)
    return np.stack([oracle.contribution(*rank) for rank in ranks])


def test_a_call_that_computes_an_up_projection_is_refused():
    spec = gather_spec(1, 16, has_residual=False, max_tokens=4, latent_dim=24)
    with pytest.raises(latent_tail.UnavailableError, match="on CPUs there is no call"):
        native.load("cpu").open_cpu([[0]], spec, [0], 0, 1.0, -1)
    result = jax.ShapeDtypeStruct((2, 16), bfloat16)
    call = functools.partial(
        jax.ffi.ffi_call(native.CPU_TARGET, result), **native.attributes([[0]], spec), module=0
    )
    shapes = [(2, 24), (24, 16), (2, 16)]
    with pytest.raises(Exception, match="on CPUs there is no call"):
        jax.jit(call)(*(np.zeros(shape, bfloat16) for shape in shapes))


@pytest.mark.parametrize("fp32_internal", [False, True])
@pytest.mark.parametrize("top_k", [None, 1, 5])
@pytest.mark.parametrize(("tp", "num_tokens", "latent_dim", "shard_dim"), SHAPES)
def test_fused(tp, num_tokens, latent_dim, shard_dim, top_k, fp32_internal):
    inputs = harness.random_inputs(
        num_tokens, tp, num_tokens, latent_dim, tp * shard_dim, top_k=top_k
    )
    latents, shards = harness.fused(inputs, implementation="cpu", fp32_internal=fp32_internal)
    expected = oracle.latent(contributions(inputs), inputs.gamma, fp32_internal=fp32_internal)
    assert (latents == latents[0]).all()
    assert oracle.ulps(latents[0], expected).max() <= 1
    assert oracle.ulps(shards, oracle.shards(inputs.shared)).max() == 0
    _, plain_shards = harness.fused(inputs, implementation="xla", fp32_internal=fp32_internal)
    np.testing.assert_array_equal(shards.view(np.uint16), plain_shards.view(np.uint16))


@pytest.mark.parametrize("top_k", [None, 4])
def test_sums_are_bit_equal_to_the_references(top_k):
    """With gamma 1 and eps that dwarfs all squares, latent shows the sum itself, scaled."""
    inputs = harness.random_inputs(5, 8, 9, 512, 64, top_k=top_k)
    inputs.gamma[:] = 1
    options = {"eps": 2.0**100, "fp32_internal": True}
    native, _ = harness.fused(inputs, implementation="cpu", **options)
    plain, _ = harness.fused(inputs, implementation="xla", **options)
    assert np.abs(native.astype(np.float32)).max() > 0
    np.testing.assert_array_equal(native.view(np.uint16), plain.view(np.uint16))


@pytest.mark.parametrize("fp32_internal", [False, True])
def test_squares_are_rounded_where_the_contract_says_so(fp32_internal):
    """Most columns hold one value, whose square the rounding moves far, and so many a y."""
    inputs = harness.random_inputs(11, 2, 8, 4096, 64, draw=harness.normal)
    inputs.rows[1] = 0
    candidates = np.arange(1, 2, 1 / 128, np.float32)
    squares = candidates**2
    moved = np.abs(squares.astype(bfloat16).astype(np.float32) / squares - 1)
    inputs.rows[0, :, ::2] = candidates[moved.argmax()]
    inputs.rows[0, :, 1::2] *= 0.25
    latents, _ = harness.fused(inputs, implementation="cpu", fp32_internal=fp32_internal)
    expected = oracle.latent(inputs.rows, inputs.gamma, fp32_internal=fp32_internal)
    assert (oracle.ulps(latents[0], expected) > 0).mean() < 0.005


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
def test_special_values(implementation):
    """NaN, infinities of both signs and zeros of both signs, in either half."""
    inputs = harness.random_inputs(6, 2, 6, 64, 64, draw=harness.normal)
    for array in (inputs.rows, inputs.shared):
        array[:, 0] = -0.0
        array[0, 1, 3] = np.nan
        array[0, 2, 5] = np.inf
        array[1, 3, 7], array[0, 3, 7] = np.inf, -np.inf
        array[:, 4] = 3e38  # overflows in the sum
    latents, shards = harness.fused(inputs, implementation=implementation)
    with np.errstate(all="ignore"):
        expected = oracle.latent(inputs.rows, inputs.gamma)
    assert oracle.ulps(latents[0], expected).max() <= 1
    assert oracle.ulps(shards, oracle.shards(inputs.shared)).max() == 0
    assert not np.signbit(shards[:, 0].astype(np.float32)).any()
    assert np.isnan(shards.astype(np.float32)).any()


@pytest.mark.parametrize("skipped", [-1, np.iinfo(np.int32).min])
def test_rows_of_skipped_slots_and_of_none_at_all(skipped):
    inputs = harness.random_inputs(7, 2, 5, 64, 64, top_k=3, num_rows=0)
    inputs.indices[:] = skipped
    latents, _ = harness.fused(inputs, implementation="cpu")
    assert (latents.astype(np.float32) == 0).all()


def test_an_index_beyond_the_rows_makes_its_token_nan_and_no_other():
    inputs = harness.random_inputs(8, 2, 5, 64, 64, top_k=3)
    inputs.indices[1, 2, 1] = len(inputs.rows[0])
    latents, _ = harness.fused(inputs, implementation="cpu")
    is_nan = np.isnan(latents.astype(np.float32)).all(axis=(0, 2))
    assert is_nan.tolist() == [False, False, True, False, False]
    assert not np.isnan(latents[:, [0, 1, 3, 4]].astype(np.float32)).any()


def test_subnormal_inputs_give_what_the_reference_gives():
    inputs = harness.random_inputs(9, 2, 4, 64, 64)
    for array in (inputs.rows, inputs.shared):
        bits = np.random.default_rng(0).integers(1, 0x80, array.shape).astype(np.uint16)
        array.view(np.uint16)[...] = bits
    native = harness.fused(inputs, implementation="cpu")
    plain = harness.fused(inputs, implementation="xla")
    np.testing.assert_array_equal(native[1].astype(np.float32), plain[1].astype(np.float32))
    assert oracle.ulps(native[0], plain[0]).max() <= 1


def gathered(tp, implementation, x, *residual):
    """Each rank's all_gather_add [tp, M, H] of columns that are x [M, H] together."""
    mesh = harness.make_mesh((tp,))
    gather = functools.partial(
        latent_tail.all_gather_add, axis_name="tp", implementation=implementation
    )
    specs = (P(None, "tp"), P())[: 1 + len(residual)]
    program = jax.jit(jax.shard_map(gather, mesh=mesh, in_specs=specs, out_specs=P()))
    return harness.per_rank(program(x, *residual), mesh)


def any_bits(seed, num_tokens, hidden_dim):
    """Two arrays [M, H]: pairs of special values, then any words but NaNs of other kinds."""
    special = [0, 1, 0x7F, 0x80, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0]  # 0, subnormal to normal, 1 to NaN
    special = np.uint16([sign | word for word in special for sign in (0, 0x8000)])
    words = np.random.default_rng(seed).integers(0, 1 << 16, (2, num_tokens * hidden_dim))
    words = words.astype(np.uint16)
    words[words & 0x7FFF > 0x7F80] = 0x7FC0  # plain collectives keep no other
    count = min(len(special) ** 2, words.shape[1])
    words[:, :count] = np.stack(np.meshgrid(special, special)).reshape(2, -1)[:, :count]
    return words.reshape(2, num_tokens, hidden_dim).view(bfloat16)


def flushed(values):
    """fp32 values, subnormal ones as zeros of their sign."""
    values = values.astype(np.float32)
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(0, values), values)


def added(x, residual):
    """The bf16 of the fp32 sum."""
    with np.errstate(all="ignore"):
        return flushed(flushed(x) + flushed(residual)).astype(bfloat16)


def check_bits(actual, expected):
    """Equal bits, or NaN in the same places."""
    same = (actual.view(np.uint16) == expected.view(np.uint16)) | (
        np.isnan(actual) & np.isnan(expected)
    )
    assert same.all(), (actual[~same][:5], expected[~same][:5])


GATHERS = [  # tp, M, H / tp
    (1, 3, 64),
    (2, 1, 3584),
    (2, 8, 3584),
    (3, 5, 56),
    (8, 1, 896),
    (8, 13, 40),
    (8, 128, 896),
]


@pytest.mark.parametrize(("tp", "num_tokens", "shard_dim"), GATHERS)
def test_all_gather_add(tp, num_tokens, shard_dim):
    x, residual = any_bits(tp, num_tokens, tp * shard_dim)
    for implementation in ("cpu", "xla"):
        for rank in gathered(tp, implementation, x, residual):
            check_bits(rank, added(x, residual))


@pytest.mark.parametrize(("tp", "num_tokens", "shard_dim"), GATHERS)
def test_all_gather_without_a_residual_copies_bits(tp, num_tokens, shard_dim):
    x, _ = any_bits(tp, num_tokens, tp * shard_dim)
    x.view(np.uint16)[0, :2] = 0x7FA5, 0xFFA5  # signalling NaNs
    for rank in gathered(tp, "cpu", x):
        np.testing.assert_array_equal(rank.view(np.uint16), x.view(np.uint16))


def test_a_gather_is_not_taken_for_a_tail_of_its_sizes_nor_for_one_with_a_residual():
    """All in one program, whose calls have descriptions that differ in the kind alone."""
    tp, num_tokens, hidden_dim = 4, 8, 64
    rng = np.random.default_rng(12)
    x, residual, shared = rng.integers(-4, 4, (3, num_tokens, hidden_dim)).astype(np.float32)
    mesh = harness.make_mesh((tp,))
    options = {"axis_name": "tp", "implementation": "cpu"}

    def calls(x, residual, shared):
        return (
            latent_tail.all_gather_add(x, **options),
            latent_tail.reduce_scatter(shared, **options),
            latent_tail.all_gather_add(x, residual, **options),
        )

    out_specs = (P(), P(None, "tp"), P())
    program = jax.jit(
        jax.shard_map(calls, mesh=mesh, in_specs=(P(None, "tp"), P(), P()), out_specs=out_specs)
    )
    for expected, actual in zip(
        (x, tp * shared, x + residual),
        program(*(array.astype(bfloat16) for array in (x, residual, shared))),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(actual, np.float32), expected)


@pytest.mark.smoke
def test_it_is_what_calls_take_by_default():
    inputs = harness.random_inputs(10, 4, 6, 64, 64)
    _, shards = harness.fused(inputs)
    assert oracle.ulps(shards, oracle.shards(inputs.shared)).max() == 0
    taken = [made for made in choice.choices() if made.spec.tp == 4]
    assert taken[-1].implementation == "cpu"
