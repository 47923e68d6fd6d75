"""Bad input: refused while tracing, by a typed error that says what is allowed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import make_mesh
from jax.sharding import PartitionSpec as P

import jax_latent_tail as latent_tail
from jax_latent_tail import ArgumentTypeError, ArgumentValueError, Unfinalized

TP, TOKENS, LATENT, HIDDEN = 4, 6, 16, 32

BF16 = jnp.bfloat16


def good():
    return {
        "routed": jnp.ones((TOKENS, LATENT), BF16),
        "shared": jnp.ones((TOKENS, HIDDEN), BF16),
        "gamma": jnp.ones((LATENT,), BF16),
        "axis_name": "tp",
    }


def unfinalized(**changes):
    parts = {
        "permuted": jnp.ones((9, LATENT), BF16),
        "weights": jnp.ones((TOKENS, 2), BF16),
        "indices": jnp.zeros((TOKENS, 2), jnp.int32),
    }
    return Unfinalized(**(parts | changes))


def trace(**changes):
    """Traces fused on per-rank views; no input is split, so that shapes are as written."""
    arguments = good() | changes
    arrays = {name: arguments.pop(name) for name in ("routed", "shared", "gamma")}

    def call(arrays):
        return latent_tail.fused(**arrays, **arguments)

    mapped = jax.shard_map(
        call, mesh=make_mesh((TP,)), in_specs=P(), out_specs=(P(), P(None, "tp"))
    )
    return jax.eval_shape(mapped, arrays)


@pytest.fixture(autouse=True)
def _usable_afterwards():
    yield
    latent, shard = trace()
    assert (latent.shape, shard.shape) == ((TOKENS, LATENT), (TOKENS, HIDDEN))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("argument", "value", "error", "says"),
    [
        ("routed", jnp.ones((2, TOKENS, LATENT), BF16), ArgumentValueError, "2 dimensions"),
        ("routed", jnp.ones((TOKENS, LATENT), jnp.float32), ArgumentTypeError, "bfloat16"),
        ("routed", jnp.ones((TOKENS, 0), BF16), ArgumentValueError, "at least one column"),
        ("shared", jnp.ones((TOKENS, HIDDEN + 2), BF16), ArgumentValueError, "multiple of the 4"),
        ("shared", jnp.ones((TOKENS + 1, HIDDEN), BF16), ArgumentValueError, "6 tokens"),
        ("shared", jnp.ones((TOKENS, HIDDEN), jnp.float16), ArgumentTypeError, "bfloat16"),
        ("shared", jnp.ones((TOKENS, 0), BF16), ArgumentValueError, "at least one column"),
        ("shared", jnp.ones((HIDDEN,), BF16), ArgumentValueError, "2 dimensions"),
        ("gamma", jnp.ones((LATENT, 1), BF16), ArgumentValueError, "1 dimension"),
        ("gamma", jnp.ones((LATENT + 1,), BF16), ArgumentValueError, r"\(16,\)"),
        ("gamma", jnp.ones((LATENT,), jnp.float32), ArgumentTypeError, "bfloat16"),
    ],
)
def test_arrays(argument, value, error, says):
    with pytest.raises(error, match=says) as caught:
        trace(**{argument: value})
    assert caught.value.argument == argument
    assert isinstance(caught.value, latent_tail.ArgumentError)


@pytest.mark.parametrize(
    ("changes", "argument", "error", "says"),
    [
        ({"weights": jnp.ones((TOKENS, 2))}, "routed.weights", ArgumentTypeError, "bfloat16"),
        ({"indices": jnp.ones((TOKENS, 2))}, "routed.indices", ArgumentTypeError, "int32"),
        (
            {"indices": jnp.zeros((TOKENS, 2), jnp.int16)},
            "routed.indices",
            ArgumentTypeError,
            "int32",
        ),
        (
            {"indices": jnp.zeros((TOKENS * 2,), jnp.int32)},
            "routed.indices",
            ArgumentValueError,
            "2 dimensions",
        ),
        (
            {"weights": jnp.ones((TOKENS, 3), BF16)},
            "routed.weights",
            ArgumentValueError,
            "equal shapes",
        ),
        (
            {
                "weights": jnp.ones((TOKENS, 0), BF16),
                "indices": jnp.zeros((TOKENS, 0), jnp.int32),
            },
            "routed.weights",
            ArgumentValueError,
            "K >= 1",
        ),
        (
            {"permuted": jnp.ones((9, LATENT))},
            "routed.permuted",
            ArgumentTypeError,
            "bfloat16",
        ),
        ({"permuted": jnp.ones((9,), BF16)}, "routed.permuted", ArgumentValueError, "2 dim"),
    ],
)
def test_unfinalized_rows(changes, argument, error, says):
    with pytest.raises(error, match=says) as caught:
        trace(routed=unfinalized(**changes))
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"eps": 0.0}, ArgumentValueError, "eps is 0.0; allowed: a number that is normal in fp32"),
        ({"eps": -1e-6}, ArgumentValueError, "normal in fp32"),
        ({"eps": float("nan")}, ArgumentValueError, "normal in fp32"),
        ({"eps": float("inf")}, ArgumentValueError, "normal in fp32"),
        ({"eps": 1e-39}, ArgumentValueError, "normal in fp32"),
        ({"eps": 1e39}, ArgumentValueError, "normal in fp32"),
        ({"eps": 10**400}, ArgumentValueError, "normal in fp32"),
        ({"eps": np.complex64(1)}, ArgumentTypeError, "real"),
        ({"eps": "1e-6"}, ArgumentTypeError, "a real Python or NumPy number"),
        ({"eps": True}, ArgumentTypeError, "number"),
        ({"eps": jnp.float32(1e-6)}, ArgumentTypeError, "eps is a"),
        ({"fp32_internal": 1}, ArgumentTypeError, "True or False"),
        ({"max_tokens": 0}, ArgumentValueError, ">= 1"),
        ({"max_tokens": 1.5}, ArgumentTypeError, "an integer"),
        ({"implementation": "nccl"}, ArgumentValueError, "'xla'"),
        ({"implementation": np.array(["xla", "cuda"])}, ArgumentTypeError, "'xla'"),
        ({"axis_name": "ep"}, ArgumentValueError, "bound here: 'tp'"),
        ({"axis_name": ("tp", "ep")}, ArgumentValueError, "'ep'"),
        ({"axis_name": ("tp", "tp")}, ArgumentValueError, "each name once"),
        ({"axis_name": ()}, ArgumentTypeError, "a tuple of such names"),
        ({"axis_name": None}, ArgumentTypeError, "the name of a mesh axis"),
        ({"axis_name": 0}, ArgumentTypeError, "the name of a mesh axis"),
    ],
)
def test_options(options, error, says):
    with pytest.raises(error, match=says):
        trace(**options)


def test_values_that_are_not_arrays():
    shared = [[1.0] * HIDDEN] * TOKENS

    def call(routed, gamma):
        return latent_tail.fused(routed, shared, gamma, axis_name="tp")

    mapped = jax.shard_map(call, mesh=make_mesh((TP,)), in_specs=P(), out_specs=(P(), P()))
    with pytest.raises(ArgumentTypeError, match="shared is a list"):
        jax.eval_shape(mapped, good()["routed"], good()["gamma"])


@pytest.mark.smoke
def test_outside_shard_map():
    for wrap in (jax.jit, lambda f: f):
        with pytest.raises(ArgumentValueError, match=r"enclosing shard_map.*bound here: none"):
            wrap(functools.partial(latent_tail.reduce_scatter, axis_name="tp"))(good()["shared"])


def test_a_gamma_that_varies_over_the_group():
    mapped = jax.shard_map(
        functools.partial(latent_tail.all_reduce_rms_norm, axis_name="tp"),
        mesh=make_mesh((TP,)),
        in_specs=(P("tp"), P("tp")),
        out_specs=P(),
    )
    with pytest.raises(ArgumentValueError, match=r"varying over \['tp'\].*same array on every"):
        jax.eval_shape(
            mapped, jnp.ones((TP * TOKENS, LATENT), BF16), jnp.ones((TP * LATENT,), BF16)
        )


@pytest.mark.parametrize("argument", ["routed", "routed.permuted", "shared"])
def test_an_unreduced_operand(argument):
    def unreduced(x):
        return jax.lax.pcast(x, ("tp",), to="unreduced")

    def call(rows, shared, gamma):
        if argument == "shared":
            return latent_tail.reduce_scatter(unreduced(shared), axis_name="tp")
        routed = unreduced(rows)
        if argument == "routed.permuted":
            routed = unfinalized(permuted=routed)
        return latent_tail.all_reduce_rms_norm(routed, gamma, axis_name="tp")

    mapped = jax.shard_map(
        call, mesh=make_mesh((TP,)), in_specs=(P("tp"), P("tp"), P()), out_specs=P("tp")
    )
    rows, shared = (jnp.ones((TP * TOKENS, columns), BF16) for columns in (LATENT, HIDDEN))
    with pytest.raises(ArgumentTypeError, match="not unreduced") as caught:
        jax.eval_shape(mapped, rows, shared, jnp.ones((LATENT,), BF16))
    assert caught.value.argument == argument


def test_numpy_arrays_and_numbers_are_fine():
    ones = np.ones((TOKENS, HIDDEN), BF16)

    def call():
        return latent_tail.reduce_scatter(ones, axis_name="tp", max_tokens=np.int64(4))

    mapped = jax.shard_map(call, mesh=make_mesh((TP,)), in_specs=(), out_specs=P(None, "tp"))
    np.testing.assert_array_equal(jax.jit(mapped)(), np.full((TOKENS, HIDDEN), 4, BF16))
    assert trace(eps=np.float32(1e-5))[0].shape == (TOKENS, LATENT)
