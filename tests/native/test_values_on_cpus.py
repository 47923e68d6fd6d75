"""The native calls on CPUs against the oracle, and bit for bit against the reference."""

import harness
import numpy as np
import oracle
import pytest
from ml_dtypes import bfloat16

from jax_latent_tail import choice

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


@pytest.mark.smoke
def test_it_is_what_calls_take_by_default():
    inputs = harness.random_inputs(10, 4, 6, 64, 64)
    _, shards = harness.fused(inputs)
    assert oracle.ulps(shards, oracle.shards(inputs.shared)).max() == 0
    taken = [made for made in choice.choices() if made.spec.tp == 4]
    assert taken[-1].implementation == "cpu"
