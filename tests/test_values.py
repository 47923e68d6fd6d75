"""The numbers: sums to the bit, normalised rows to one bf16 ulp, all ranks alike."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import Inputs, flat, fused, make_mesh, normal, random_inputs, spread
from jax.sharding import PartitionSpec as P
from ml_dtypes import bfloat16

import jax_latent_tail as latent_tail
from jax_latent_tail import reference

pytestmark = pytest.mark.usefixtures("implementation")


def contributions(inputs):
    if inputs.indices is None:
        return inputs.rows
    each = zip(inputs.rows, inputs.weights, inputs.indices, strict=True)
    return np.stack([oracle.contribution(*rank) for rank in each])


def check_against_oracle(inputs, **options):
    latents, shards = fused(inputs, **options)
    check_ranks_agree(latents)
    expected = oracle.latent(contributions(inputs), inputs.gamma, **options)
    distances = oracle.ulps(latents[0], expected)
    assert distances.max(initial=0) <= 1
    # Nearly all are rounded right: a step with another rounding would show in some per cent.
    assert np.count_nonzero(distances) <= max(1, distances.size // 500)
    check_bits(shards, oracle.shards(inputs.shared))


def check_ranks_agree(latents):
    for latent in latents[1:]:
        np.testing.assert_array_equal(latent.view(np.uint16), latents[0].view(np.uint16))


def check_bits(actual, expected):
    """Equal bits, or NaN in the same places."""
    same = (actual.view(np.uint16) == expected.view(np.uint16)) | (
        np.isnan(actual) & np.isnan(expected)
    )
    assert same.all(), (actual[~same][:5], expected[~same][:5])


@pytest.mark.smoke
@pytest.mark.parametrize("fp32_internal", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3, 8])
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 33])
def test_matches_the_float64_oracle(num_tokens, tp, fp32_internal):
    inputs = random_inputs(num_tokens, tp, num_tokens, 40, 8 * tp * 3)
    check_against_oracle(inputs, fp32_internal=fp32_internal, eps=1e-5)


@pytest.mark.parametrize("num_tokens", [128, 1000, 4096])
def test_matches_the_oracle_for_prefill_sizes(num_tokens):
    check_against_oracle(random_inputs(1, 4, num_tokens, 64, 96))


@pytest.mark.parametrize(("tp", "num_tokens"), [(8, 8), (4, 32)])
def test_matches_the_oracle_at_the_widths_of_kimi_k3(tp, num_tokens):
    check_against_oracle(random_inputs(2, tp, num_tokens, 3584, 7168))


@pytest.mark.parametrize("fp32_internal", [False, True])
@pytest.mark.parametrize(("top_k", "num_tokens"), [(1, 3), (5, 8), (8, 1), (16, 20)])
def test_finalizes_expert_rows(top_k, num_tokens, fp32_internal):
    inputs = random_inputs(3, 4, num_tokens, 40, 64, top_k=top_k)
    assert np.isnan(inputs.rows.astype(np.float32)).any()
    check_against_oracle(inputs, fp32_internal=fp32_internal)


def test_finalize_sums_slots_in_ascending_order():
    inputs = random_inputs(4, 1, 64, 256, 8, top_k=16, draw=spread)
    inputs.weights[:] = 1
    backwards = Inputs(
        inputs.shared,
        inputs.gamma,
        inputs.rows,
        inputs.weights[..., ::-1],
        inputs.indices[..., ::-1],
    )
    assert (contributions(inputs) != contributions(backwards)).any()
    check_against_oracle(inputs)


def test_finalize_without_any_expert_row():
    inputs = random_inputs(5, 2, 4, 40, 16, top_k=3, num_rows=0)
    assert inputs.rows.shape == (2, 0, 40)
    inputs.gamma = np.abs(inputs.gamma)
    check_against_oracle(inputs)
    latents, _ = fused(inputs)
    np.testing.assert_array_equal(latents.view(np.uint16), 0)


def test_finalize_picks_from_far_more_rows_than_slots():
    check_against_oracle(random_inputs(6, 2, 4, 40, 16, top_k=2, num_rows=5000))


def test_weights_of_skipped_slots_are_not_read():
    inputs = random_inputs(7, 2, 4, 40, 16, top_k=4)
    inputs.weights[inputs.indices < 0] = np.nan
    check_against_oracle(inputs)


def test_an_index_past_the_rows_makes_its_token_nan_and_no_other():
    inputs = random_inputs(8, 2, 4, 40, 16, top_k=3, num_rows=6, draw=normal)
    inputs.rows = normal(np.random.default_rng(0), *inputs.rows.shape)
    inputs.indices[1, 2, 0] = 6
    latents, _ = fused(inputs)
    np.testing.assert_array_equal(np.isnan(latents[0]).all(axis=-1), [False, False, True, False])
    check_against_oracle(inputs)


@pytest.mark.parametrize("num_tokens", [4, 64])
def test_ranks_are_summed_in_ascending_order(num_tokens):
    inputs = random_inputs(9, 8, num_tokens, 512, 512, draw=spread)
    reverse = oracle.shards(inputs.shared[::-1])
    assert (reverse != oracle.shards(inputs.shared)).any(), "the data must show the order"
    check_against_oracle(inputs, fp32_internal=True)
    check_against_oracle(inputs)


def test_squares_are_rounded_to_bf16_only_without_fp32_internal():
    inputs = random_inputs(17, 2, 500, 8, 16, draw=normal)
    for fp32_internal in (False, True):
        check_against_oracle(inputs, fp32_internal=fp32_internal)
    s = oracle.rank_sum(inputs.rows).astype(bfloat16).astype(np.float32)
    exact_squares = oracle.rms_norm(s, inputs.gamma, 1e-6, True)
    expected = oracle.latent(inputs.rows, inputs.gamma)
    assert (expected.astype(bfloat16) != exact_squares.astype(bfloat16)).mean() > 0.01


def test_eps_is_added_to_the_mean_square():
    inputs = random_inputs(18, 2, 50, 40, 16, draw=normal)
    inputs.rows = (inputs.rows.astype(np.float32) * 1e-3).astype(bfloat16)
    for eps in (1e-6, 1e-5, 1e-2):
        check_against_oracle(inputs, eps=eps)


def test_a_sum_of_negative_zeros_is_positive_zero():
    inputs = random_inputs(10, 4, 3, 40, 32)
    inputs.rows[:, 1] = bfloat16(-0.0)
    inputs.shared[:, 1] = bfloat16(-0.0)
    inputs.gamma[:] = 1
    latents, shards = fused(inputs)
    np.testing.assert_array_equal(latents[:, 1].view(np.uint16), 0)
    np.testing.assert_array_equal(shards[:, 1].view(np.uint16), 0)


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan, 3e38])
@pytest.mark.parametrize("num_tokens", [4, 32])
def test_infinities_and_nans_stay_in_their_row(special, num_tokens):
    inputs = random_inputs(11, 4, num_tokens, 40, 32, draw=normal)
    inputs.rows[2, 1, 3] = special
    inputs.rows[3, 2, 5] = special
    inputs.shared[0, 3, 7] = special
    check_against_oracle(inputs)
    latents, shards = fused(inputs)
    finite_rows = np.isfinite(latents[0].astype(np.float32)).all(axis=-1)
    assert finite_rows[[0, 3]].all()
    assert np.isfinite(shards.astype(np.float32)).sum() >= shards.size - 1


def test_every_subnormal_is_kept_or_flushed_but_never_spreads():
    patterns = np.concatenate([np.arange(0x0001, 0x0080), np.arange(0x8001, 0x8080)])
    values = patterns.astype(np.uint16).view(bfloat16)
    kept = random_inputs(12, 2, 4, 256, 512, draw=normal)
    kept.rows[0, 1, : len(values)] = values
    kept.rows[1, 1] = bfloat16(-0.0)
    kept.shared[:, 2, : len(values)] = values
    flushed = dataclasses.replace(kept, rows=kept.rows.copy(), shared=kept.shared.copy())
    flushed.rows[0, 1, : len(values)] = 0
    flushed.shared[:, 2, : len(values)] = 0

    latents, shards = fused(kept)
    check_ranks_agree(latents)
    either_latent = [
        oracle.ulps(latents[0], oracle.latent(inputs.rows, inputs.gamma))
        for inputs in (kept, flushed)
    ]
    either_shard = [oracle.ulps(shards, oracle.shards(inputs.shared)) for inputs in (kept, flushed)]
    assert np.minimum(*either_latent).max() <= 1
    assert np.minimum(*either_shard).max() == 0


@pytest.mark.parametrize("top_k", [None, 2])
def test_no_tokens_give_empty_results(top_k):
    inputs = random_inputs(13, 2, 0, 40, 16, top_k=top_k, num_rows=3)
    latents, shards = fused(inputs)
    assert (latents.shape, shards.shape) == ((2, 0, 40), (2, 0, 8))
    assert latents.dtype == shards.dtype == bfloat16


def test_each_half_alone_equals_its_part_of_fused():
    inputs = random_inputs(14, 4, 16, 40, 64, top_k=3)
    mesh = make_mesh((4,))
    latents, shards = fused(inputs)

    def routed_half(routed, gamma):
        return latent_tail.all_reduce_rms_norm(routed, gamma, axis_name="tp")

    def shared_half(shared):
        return latent_tail.reduce_scatter(shared, axis_name="tp")

    latent = jax.jit(jax.shard_map(routed_half, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P()))(
        inputs.routed, jnp.asarray(inputs.gamma)
    )
    shard = jax.jit(
        jax.shard_map(shared_half, mesh=mesh, in_specs=P("tp"), out_specs=P(None, "tp"))
    )(flat(inputs.shared))
    np.testing.assert_array_equal(np.asarray(latent).view(np.uint16), latents[0].view(np.uint16))
    expected = shards.swapaxes(0, 1).reshape(shard.shape)
    np.testing.assert_array_equal(np.asarray(shard).view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("implementation", ["xla"], indirect=True)
def test_one_shot_and_two_shot_forms_agree_to_the_bit(implementation, monkeypatch):
    inputs = random_inputs(15, 8, 13, 40, 64)
    latents = []
    for limit in (0, 13):
        monkeypatch.setattr(reference, "ONE_SHOT_MAX_TOKENS", limit)
        jax.clear_caches()
        latents.append(fused(inputs)[0])
    np.testing.assert_array_equal(latents[0].view(np.uint16), latents[1].view(np.uint16))


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("num_tokens", [8, 33])
def test_implementations_agree(num_tokens, top_k):
    inputs = random_inputs(16, 4, num_tokens, 40, 64, top_k=top_k)
    latents, shards = fused(inputs)
    plain_latents, plain_shards = fused(inputs, implementation="xla")
    np.testing.assert_array_equal(shards.view(np.uint16), plain_shards.view(np.uint16))
    assert oracle.ulps(latents, plain_latents).max() <= 1
