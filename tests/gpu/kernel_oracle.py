"""The contract in NumPy, on bf16 as uint16 words, and inputs that try it.

All arithmetic is float32 in the order that the contract fixes; NaN results are 0x7fff, as the
GPU's conversion gives them.
"""

import dataclasses
import functools

import numpy as np

from jax_latent_tail.kernels import abi

NAN = np.uint16(0x7FFF)


def to_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round to nearest even."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (words + 0x7FFF + ((words >> 16) & 1)) >> 16
    return np.where(np.isnan(values), NAN, rounded).astype(np.uint16)


def ordered_sum(parts: np.ndarray) -> np.ndarray:
    """Over the leading axis, ascending, in float32 from +0."""
    total = np.zeros(parts.shape[1:], np.float32)
    with np.errstate(all="ignore"):
        for part in parts:
            total = total + to_float(part)
    return total


def finalize(permuted: np.ndarray, weights: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """[P, L], [M, K], [M, K] -> [M, L]"""
    total = np.zeros((len(indices), permuted.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for slot in range(indices.shape[1]):
            index = indices[:, slot]
            for token in np.flatnonzero(index >= 0):
                row = to_float(permuted[index[token]])
                total[token] = total[token] + to_float(weights[token, slot]) * row
    return to_bf16(total)


def all_reduce_norm(rows: np.ndarray, gamma: np.ndarray, eps: float, fp32_internal: bool):
    """[tp, M, L], [L] -> [M, L], the rows' sum in float64: within 1 ulp of any order."""
    with np.errstate(all="ignore"):
        total = ordered_sum(rows)
        if fp32_internal:
            x, squares = total, total * total
        else:
            x = to_float(to_bf16(total))
            squares = to_float(to_bf16(x * x))
        mean = squares.astype(np.float64).sum(-1, keepdims=True) / total.shape[-1]
        inverse = (1.0 / np.sqrt(mean + np.float64(np.float32(eps)))).astype(np.float32)
        return to_bf16(x * inverse * to_float(gamma))


def reduce_scatter(shared: np.ndarray, rank: int) -> np.ndarray:
    """[tp, M, H] -> [M, S]"""
    width = shared.shape[-1] // len(shared)
    return to_bf16(ordered_sum(shared[:, :, rank * width : (rank + 1) * width]))


def _ordinal(bits: np.ndarray) -> np.ndarray:
    """Neighbouring bf16 numbers have neighbouring ordinals."""
    magnitude = (bits & 0x7FFF).astype(np.int32)
    return np.where(bits & 0x8000, -magnitude, magnitude)


def ulps(got: np.ndarray, want: np.ndarray) -> int:
    """Greatest distance in units of the last place; NaN only equals NaN."""
    nan = ((got & 0x7FFF) > 0x7F80, (want & 0x7FFF) > 0x7F80)
    if (nan[0] != nan[1]).any():
        return 1 << 16
    distance = np.abs(_ordinal(got) - _ordinal(want))
    return int(np.where(nan[0], 0, distance).max(initial=0))


# ---- inputs

CLASSES = ("normal", "spread", "minus zero", "subnormal", "special")


def draw(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """bf16 words of one class of bit patterns."""
    values = to_bf16(rng.standard_normal(shape, dtype=np.float32))
    pick = rng.random(shape, dtype=np.float32)
    if kind == "normal":  # with some of each zero
        values = np.where(pick < 1 / 16, np.uint16(0x8000), values)
        return np.where(pick > 31 / 32, np.uint16(0), values)
    if kind == "spread":  # magnitudes apart by up to 2^24: the order of a sum shows
        return to_bf16(to_float(values) * np.exp2(rng.integers(-12, 13, shape)).astype(np.float32))
    if kind == "minus zero":  # every combination of zeros in the two halves of a word
        return np.where(pick < 0.6, np.uint16(0x8000), np.uint16(0))
    if kind == "subnormal":  # each of 0x8001..0x807f and 0x0001..0x007f, in both halves
        pattern = rng.integers(1, 0x80, shape, dtype=np.uint16)
        values = np.where(pick < 0.5, pattern | np.uint16(0x8000), pattern)
        return np.where(pick > 0.9, np.uint16(0x8000), values)
    if kind == "special":  # NaN of several patterns and infinities, in some rows only
        odd = np.array([0x7FC0, 0xFFFF, 0x7F81, 0xFF80, 0x7F80], np.uint16)
        rows = rng.random(shape[:-1] + (1,)) < 0.3
        where = rows & (pick < 0.002)
        return np.where(where, odd[rng.integers(0, len(odd), shape)], values)
    raise ValueError(kind)


@dataclasses.dataclass
class Data:
    """Inputs of all ranks for `tokens` tokens, and what the contract makes of them.

    Rows are independent: a call of fewer tokens takes a window.
    """

    gamma: np.ndarray  # [L]
    rows: np.ndarray  # [tp, M, L], or permuted [tp, P, L]
    weights: np.ndarray | None  # [tp, M, K]
    indices: np.ndarray | None
    shared: np.ndarray  # [tp, M, H]
    latent: np.ndarray  # [M, L]
    shard: np.ndarray  # [tp, M, S]


def make(
    seed: int, kind: str, tp: int, tokens: int, latent: int, hidden: int, top_k: int = 0,
    fp32_internal: bool = False, eps: float = 1e-6,
) -> Data:  # fmt: skip
    rng = np.random.default_rng(seed)
    gamma = draw(rng, (latent,), "normal")
    shared = draw(rng, (tp, tokens, hidden), kind)
    weights = indices = None
    if top_k:
        rows_there = tokens * top_k // 2 + 3
        rows = draw(rng, (tp, rows_there, latent), kind)
        weights = draw(rng, (tp, tokens, top_k), "normal")
        indices = rng.integers(0, rows_there - 1, (tp, tokens, top_k), dtype=np.int32)
        skip = rng.random(indices.shape) < 0.2
        indices = np.where(skip, rng.integers(-3, 0, indices.shape, dtype=np.int32), indices)
        # What is skipped must not leak: NaN weights there, and a row of NaN that nobody names.
        weights = np.where(skip, np.uint16(0x7FC0), weights)
        rows[:, -1] = 0x7FC0
        contributions = np.stack(
            [finalize(*of) for of in zip(rows, weights, indices, strict=False)]
        )
    else:
        rows = contributions = draw(rng, (tp, tokens, latent), kind)
    return Data(
        gamma=gamma,
        rows=rows,
        weights=weights,
        indices=indices,
        shared=shared,
        latent=all_reduce_norm(contributions, gamma, eps, fp32_internal),
        shard=np.stack([reduce_scatter(shared, rank) for rank in range(tp)]),
    )


# ---- all_gather_add


def all_gather_add(x: np.ndarray, residual: np.ndarray | None) -> np.ndarray:
    """[tp, M, S], [M, H] or None -> [M, H]"""
    gathered = np.concatenate(list(x), axis=-1)
    words = gathered.view(np.uint32)  # one pair of NaNs is copied as another
    gathered = np.where(words == abi.ESCAPED, np.uint32(abi.OTHER_NAN), words).view(np.uint16)
    if residual is None:
        return gathered
    with np.errstate(all="ignore"):
        return to_bf16(to_float(gathered) + to_float(residual))


@dataclasses.dataclass
class GatherData:
    """Inputs of all ranks for `tokens` tokens, and what the contract makes of them."""

    x: np.ndarray  # [tp, M, S]
    residual: np.ndarray  # [M, H]
    added: np.ndarray  # [M, H]
    copied: np.ndarray  # [M, H], without the residual


def gather_data(x: np.ndarray, residual: np.ndarray) -> GatherData:
    return GatherData(x, residual, all_gather_add(x, residual), all_gather_add(x, None))


def make_gather(seed: int, kind: str, tp: int, tokens: int, hidden: int) -> GatherData:
    rng = np.random.default_rng(seed)
    if kind == "patterns":  # every bf16, and the words that the protocol keeps for itself
        x = rng.integers(0, 1 << 16, (tp, tokens, hidden // tp), dtype=np.uint16)
        words = x.view(np.uint32)
        own = np.array([abi.SENTINEL, abi.ESCAPED, abi.OTHER_NAN], np.uint32)
        words[...] = np.where(rng.random(words.shape) < 0.2, rng.choice(own, words.shape), words)
        return gather_data(x, draw(rng, (tokens, hidden), "minus zero"))
    x = draw(rng, (tp, tokens, hidden // tp), kind)
    return gather_data(x, draw(rng, (tokens, hidden), kind))


# ---- up_gather_add

UP_CLASSES = ("normal", "integers", "zeros", "special")

# Of sums in fp32 in any order, also by tensor cores that cut off what is small: error by the sum of
# magnitudes.
_SLACK = 2.0**-18


@dataclasses.dataclass
class UpData:
    """Inputs of all ranks for `tokens` tokens, and between which words the contract's results lie.

    Rank r has the columns from r * S on of `weights` and `x`, so the same data serve any tp.
    """

    latent: np.ndarray  # [M, L]
    weights: np.ndarray  # [L, H]
    x: np.ndarray  # [M, H]
    residual: np.ndarray  # [M, H]
    copied: tuple[np.ndarray, np.ndarray]  # least and most [M, H], without the residual
    added: tuple[np.ndarray, np.ndarray]


def up_data(latent, weights, x, residual, slack: float) -> UpData:
    """`slack` 0: fp32 holds every sum, so there is one result."""
    with np.errstate(all="ignore"):
        of_latent, of_weights = to_float(latent).astype(float), to_float(weights).astype(float)
        exact = of_latent @ of_weights + 0.0 + to_float(x)
        error = np.zeros(())
        if slack:
            error = slack * (np.abs(of_latent) @ np.abs(of_weights) + np.abs(to_float(x)))
            error = np.where(np.isfinite(error), error, 0)
        bounds = (exact - error, exact + error)
        copied = tuple(to_bf16(bound.astype(np.float32)) for bound in bounds)
        added = tuple(to_bf16(to_float(words) + to_float(residual)) for words in copied)
    return UpData(latent, weights, x, residual, copied, added)


def between(got: np.ndarray, least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Where the words may be right: between the two, and equal to them where they are equal."""
    inside = (_ordinal(least) <= _ordinal(got)) & (_ordinal(got) <= _ordinal(most))
    return np.where(least == most, got == least, inside)


@functools.cache
def make_up(seed: int, kind: str, tokens: int, latent: int, hidden: int) -> UpData:
    rng = np.random.default_rng(seed)
    make = {"integers": _integers, "zeros": _zeros}.get(kind)
    if make:
        return make(rng, tokens, latent, hidden)
    columns = rng.standard_normal((latent, hidden), dtype=np.float32)
    weights = to_bf16(columns / np.float32(np.sqrt(latent)))
    y, x = (to_bf16(rng.standard_normal((tokens, n), dtype=np.float32)) for n in (latent, hidden))
    if kind == "special":  # one NaN or infinity in some rows and in some columns, and in x
        odd = np.array([0x7FC0, 0xFFFF, 0x7F81, 0xFF80, 0x7F80, 0xFF80, 0x7F80], np.uint16)
        for token in range(1, tokens, 4):
            y[token, rng.integers(latent)] = rng.choice(odd)
        for column in np.flatnonzero(rng.random(hidden) < 0.02):
            weights[rng.integers(latent), column] = rng.choice(odd)
        x = draw(rng, x.shape, kind)
    return up_data(y, weights, x, draw(rng, x.shape, kind), _SLACK)


def _integers(rng, tokens, latent, hidden) -> UpData:
    """Small integers, scaled by a power of two for each token and each column."""
    of_token = np.exp2(rng.integers(-8, 9, (tokens, 1))).astype(np.float32)
    of_column = np.exp2(rng.integers(-8, 9, (1, hidden))).astype(np.float32)

    def integers(shape, most):
        return rng.integers(-most, most + 1, shape, dtype=np.int16).astype(np.float32)

    y = to_bf16(integers((tokens, latent), 8) * of_token)
    weights = to_bf16(integers((latent, hidden), 8) * of_column)
    x = to_bf16(integers((tokens, hidden), 255) * of_token * of_column)
    return up_data(y, weights, x, draw(rng, (tokens, hidden), "spread"), 0.0)


def _zeros(rng, tokens, latent, hidden) -> UpData:
    """Results of both zeros: a product of zeros plus a zero of each sign, and sums that are too
    small for a bf16. Some pairs are the word that must not travel."""
    y = np.full((tokens, latent), to_bf16(np.array((1 + 2**-7) * 2.0**-61)))
    weights = draw(rng, (latent, hidden), "minus zero")
    x = draw(rng, (tokens, hidden), "minus zero")
    # (1 + 2^-7) * (1 - 2^-7) = 1 - 2^-14, less 1: in fp32 alone.
    factor = to_bf16(np.array((1 - 2**-7) * 2.0**-61))
    one = to_bf16(np.array(2.0**-122))
    minus = np.uint16(0x8000)
    kind = rng.integers(0, 3, hidden)
    for sign, columns in ((0, np.flatnonzero(kind == 1)), (minus, np.flatnonzero(kind == 2))):
        weights[rng.integers(0, latent, len(columns)), columns] = factor | sign
        x[:, columns] = one | (minus ^ sign)
    data = up_data(y, weights, x, draw(rng, (tokens, hidden), "minus zero"), 0.0)
    assert not (data.copied[0] & 0x7FFF).any()
    return data
