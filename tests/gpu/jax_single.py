"""One process and one GPU, a group of one rank: what needs a collective of XLA works there too."""

import functools

import jax
import jax.numpy as jnp
import jax_ranks as ranks
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_latent_tail as latent_tail


def gradients():
    inputs = ranks.inputs_of(0, 8, draw=ranks.normal)
    arrays = ranks.operands(inputs)

    def loss(implementation, *arrays):
        def of_views(routed, shared, gamma):
            latent, shard = latent_tail.fused(
                routed, shared, gamma, axis_name="tp", implementation=implementation
            )
            latent, shard = (x.astype(jnp.float32) for x in (latent, shard))
            return lax.psum((latent**2).sum() / 2 + jnp.sin(shard).sum(), "tp")

        step = ranks.program(of_views, out_specs=P())
        return step(*arrays)

    native = jax.jit(jax.grad(functools.partial(loss, "cuda"), argnums=(0, 1, 2)))
    plain = jax.jit(jax.grad(functools.partial(loss, "xla"), argnums=(0, 1, 2)))
    assert "jax_latent_tail_cuda" in native.lower(*arrays).compile().as_text()
    for got, want in zip(native(*arrays), plain(*arrays), strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < 5e-3, error
        assert np.linalg.norm(want) > 0


def moe_tail_gradients():
    """Through the call that computes the up-projection: here of one token. By all arguments."""
    inputs = ranks.inputs_of(3, 1, draw=ranks.normal)
    rng = np.random.default_rng(3)
    w_up = (ranks.normal(rng, ranks.L, ranks.H) / 64).astype(jnp.bfloat16)
    residual = ranks.put(ranks.normal(rng, 1, ranks.H), P())
    arrays = (*ranks.operands(inputs), ranks.put(w_up), residual)

    def loss(implementation, *arrays):
        def of_views(*views):
            y = latent_tail.moe_tail(*views, axis_name="tp", implementation=implementation)
            return jnp.sin(y.astype(jnp.float32)).sum()

        specs = (ranks.SHARDED, ranks.SHARDED, P(), ranks.SHARDED, P())
        return ranks.program(of_views, specs, P())(*arrays)

    every = tuple(range(5))
    native = jax.jit(jax.value_and_grad(functools.partial(loss, "cuda"), argnums=every))
    plain = jax.jit(jax.value_and_grad(functools.partial(loss, "xla"), argnums=every))
    text = native.lower(*arrays).as_text()
    assert text.count("custom_call @jax_latent_tail_cuda") == 2
    assert text.count(f"latent_dim = {ranks.L}") == 2  # of the gather too
    (value, gradients), (want_value, wanted) = native(*arrays), plain(*arrays)
    assert abs(float(value) - float(want_value)) < 1e-2 * np.sqrt(residual.size)
    for got, want in zip(gradients, wanted, strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < 1e-2, error
        assert np.linalg.norm(want) > 0


def export():
    """An exported program, whose devices are not known, holds plain collectives."""
    inputs = ranks.inputs_of(1, 8)
    arrays = ranks.operands(inputs)

    def tail(routed, shared, gamma):
        return latent_tail.fused(routed, shared, gamma, axis_name="tp")

    exported = jax.export.export(ranks.program(tail), platforms=["cuda"])(*arrays)
    assert "jax_latent_tail_cuda" not in exported.mlir_module()
    ranks.check(*jax.jit(exported.call)(*arrays), inputs)


def many_tokens():
    """More than max_tokens take plain collectives, or an error where the kernel is insisted on."""
    inputs = ranks.inputs_of(2, 9)
    arrays = ranks.operands(inputs)

    def tail(routed, shared, gamma, implementation=None):
        return latent_tail.fused(
            routed, shared, gamma, axis_name="tp", max_tokens=8, implementation=implementation
        )

    ranks.check(*ranks.program(tail)(*arrays), inputs)
    assert "9 tokens are more than max_tokens=8" in latent_tail.explain()
    with pytest.raises(latent_tail.UnavailableError, match="max_tokens=8"):
        ranks.program(functools.partial(tail, implementation="cuda"))(*arrays)


if __name__ == "__main__":
    for scenario in (
        ranks.values, ranks.scan_92_layers, ranks.whole_tail, gradients, moe_tail_gradients, export,
        many_tokens,
    ):  # fmt: skip
        scenario()
        print(f"{scenario.__name__}: ok", flush=True)
    print(latent_tail.explain())
