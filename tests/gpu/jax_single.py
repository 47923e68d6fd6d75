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
    for scenario in (ranks.values, ranks.scan_92_layers, gradients, export, many_tokens):
        scenario()
        print(f"{scenario.__name__}: ok", flush=True)
    print(latent_tail.explain())
