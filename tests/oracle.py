"""The contract in NumPy: ordered fp32 sums, then the norm in float64.

Written from the contract, not from the package: nothing of it is imported here.
"""

import numpy as np
from ml_dtypes import bfloat16


def contribution(permuted, weights, indices):
    """Weighted sums [M, L] of rows [P, L] over slots, in fp32 and in order, rounded to bf16."""
    num_tokens, top_k = indices.shape
    sums = np.zeros((num_tokens, permuted.shape[1]), np.float32)
    for token in range(num_tokens):
        for slot in range(top_k):
            index = indices[token, slot]
            if index < 0:
                continue
            if index >= len(permuted):
                sums[token] = np.nan
                continue
            weight = np.float32(weights[token, slot])
            sums[token] += weight * permuted[index].astype(np.float32)
    return sums.astype(bfloat16)


def rank_sum(partials):
    """The sum over the first axis in ascending order from +0, fp32."""
    total = np.zeros(partials.shape[1:], np.float32)
    for partial in partials:
        total += partial.astype(np.float32)
    return total


def rms_norm(s, gamma, eps, fp32_internal):
    """The normalised rows in float64, to be compared to one ulp of bf16."""
    if fp32_internal:
        x = s
        square = x * x
    else:
        x = s.astype(bfloat16).astype(np.float32)
        square = (x * x).astype(bfloat16)
    row_sum = square.astype(np.float64).sum(axis=-1, keepdims=True)
    row_sum[row_sum > np.finfo(np.float32).max] = np.inf
    return x.astype(np.float64) / np.sqrt(row_sum / s.shape[-1] + eps) * gamma.astype(np.float64)


def latent(contributions, gamma, eps=1e-6, fp32_internal=False):
    """float64 [M, L] from all ranks' contributions [tp, M, L] bf16."""
    with np.errstate(all="ignore"):
        return rms_norm(rank_sum(contributions), gamma, eps, fp32_internal)


def shards(partials):
    """bf16 [tp, M, S] from all ranks' partial rows [tp, M, H] bf16."""
    with np.errstate(all="ignore"):
        total = rank_sum(partials).astype(bfloat16)
    tp, num_tokens, _ = partials.shape
    return total.reshape(num_tokens, tp, -1).swapaxes(0, 1)


def ulps(actual, expected):
    """Distances in bf16 ulps; 0 where both are NaN, huge where one is."""

    def ordinal(values):
        bits = values.view(np.int16).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFF), bits)

    both_nan = np.isnan(actual) & np.isnan(expected)
    one_nan = np.isnan(actual) ^ np.isnan(expected)
    distance = np.abs(ordinal(actual) - ordinal(expected.astype(bfloat16)))
    return np.where(one_nan, 1 << 20, np.where(both_nan, 0, distance))
