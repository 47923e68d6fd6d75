"""What the compiler makes of the kernel: parameters, memory traffic, resources. No GPU needed."""

import functools
import re

import pytest
from kernel_variants import CHOSEN, MATRIX

from jax_latent_tail.kernels import abi, geometry
from jax_latent_tail.kernels.variant import ALL_GATHER_ADD, MULTICAST, KernelVariant

pytest.importorskip("cutlass", reason="compiling kernels needs the extra `export`")
from jax_latent_tail.kernels import export

compiled = functools.cache(export.compile_variant)


def bodies(variant):
    """PTX of each kernel, by symbol."""
    parts = re.split(r"\.visible \.entry (\w+)\(", compiled(variant).ptx)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def count(pattern, text):
    return len(re.findall(pattern, text))


def every(variants):
    return pytest.mark.parametrize("variant", variants, ids=lambda variant: variant.key)


def check(variant):
    entry = compiled(variant).entry
    assert KernelVariant(**entry["variant"]) == variant
    shapes = geometry.entries(variant.tp, variant.latent, variant.hidden, variant.op)
    assert len(entry["kernels"]) == len(bodies(variant)) == len(shapes)
    for kernel, shape in zip(entry["kernels"], shapes, strict=True):
        body = bodies(variant)[kernel["symbol"]]
        # The launcher's struct, and the threads that are baked in.
        assert kernel["parameters"] == [list(field) for field in abi.parameter_layout()]
        assert f".reqntid {shape.threads}, 1, 1" in body
        # Nothing spills. With many expert rows or ranks ptxas, aiming at more CTAs an SM, may park
        # up to four words for later.
        many = variant.top_k or (variant.op == ALL_GATHER_ADD and variant.tp >= 8)
        assert kernel["stack_bytes"] <= (16 if many else 0)
        assert not re.search(r"\b(ld|st)\.local", body)
        assert kernel["registers"] * shape.threads <= 65536
        assert kernel["registers"] <= (168 if variant.tp > 8 else 128)
        check_memory(variant, body)
        (check_gather if variant.op == ALL_GATHER_ADD else check_tail)(variant, shape, body)
        # The header is sent and compared: of what travels only it has this word of the call.
        loads = rf"ld\.param\.b32\s+(%r\d+), \[{kernel['symbol']}_param_15\]"
        call_hash = "|".join(re.findall(loads, body))
        assert re.search(rf"xor\.b32\s+%r\d+, %r\d+, ({call_hash});", body)
        assert re.search(rf"selp\.b32\s+%r\d+, ({call_hash}), %r\d+,", body)


def check_memory(variant, body):
    # Nothing of the call happens before the wait for the preceding kernel.
    before, _, after = body.partition("griddepcontrol.wait;")
    assert after
    assert not re.search(r"\b(ld|st|atom|red|multimem)\.(?!param)", before)
    assert count("griddepcontrol.launch_dependents", body) == (
        ((variant.latent > 0) + (variant.hidden > 0)) * variant.trigger
    )
    # No vector is read or written in a way that a peer could miss or a cache could keep.
    assert not re.search(r"ld\.(volatile|global\.nc)|st\.volatile|ld\.global\.ca", body)


VECTOR_STORE = r"st\.relaxed\.sys\.global\.v4\.u32"
VECTOR_POLL = r"ld\.relaxed\.sys\.global\.v4\.u32"
MULTIMEM_STORE = r"multimem\.st\.relaxed\.sys\.global\.v4\.bf16x2"


def check_tail(variant, shape, body):
    # Publishing: routed rows by multimem.st or by one store a peer, never both; the scatter always
    # by one store a vector.
    def owned(vectors):
        return -(-vectors // shape.lanes)

    routed = owned(variant.latent // 8 + 1) if variant.latent else 0
    scattered = owned(variant.hidden // 8 + variant.tp) if variant.hidden else 0
    taken = routed + (owned(variant.shard // 8 + 1) if variant.hidden else 0)
    multicast = variant.publish == MULTICAST
    assert count(MULTIMEM_STORE, body) == routed * multicast
    assert count(r"multimem\.", body) == routed * multicast
    publishes = scattered + routed * (0 if multicast else variant.tp)
    rearms = taken * variant.tp
    assert count(VECTOR_STORE, body) == publishes + rearms
    assert count(VECTOR_POLL, body) == taken * variant.tp


def check_gather(variant, shape, body):
    sources = -(-variant.tp // shape.groups)  # ranks that one thread deals with
    owned = -(-(variant.shard // 8 + 1) // shape.lanes)
    rearmed = count(VECTOR_STORE + r" \[\S+\], \{s,s,s,s\}", body)
    assert rearmed == count(VECTOR_POLL, body) == owned * sources
    # By multimem.st or by one store a peer, never both: what else is stored where peers can see it
    # are sentinels, to the own workspace.
    multicast = variant.publish == MULTICAST
    assert count(MULTIMEM_STORE, body) == count(r"multimem\.", body) == owned * multicast
    assert count(VECTOR_STORE, body) - rearmed == owned * sources * (not multicast)
    # The residual and the own columns; the output, and NaN over it.
    assert count(r"\bld\.global\.v4\.u32", body) == owned * (sources + 1)
    assert count(r"\bst\.global\.v4\.u32", body) == owned * sources * 2


@every(CHOSEN)
def test_chosen(variant):
    check(variant)


@every(CHOSEN)
def test_target(variant):
    """Compiled for the arch as named: the plain one where the name has no suffix."""
    ptx = compiled(variant).ptx
    assert re.search(r"^\.target (\S+)", ptx, re.MULTILINE)[1] == variant.arch
    if variant.arch == "sm_90":  # appeared with sm_100
        assert not re.search(r"red\.async|tcgen05|\.explicitcluster", ptx)


def test_the_same_source_gives_the_same_bytes():
    variant = CHOSEN[0]
    assert export.compile_variant(variant).cubin == compiled(variant).cubin


def test_rank_ordered_sum_starts_from_plus_zero():
    """The compiler must not fold 0 + x, which would let -0 through."""
    for body in bodies(CHOSEN[0]).values():
        assert count(r"add\.(rn\.)?f32\s+\S+, \S+, 0f00000000", body) >= 2 * 8


@pytest.mark.long
@every(MATRIX)
def test_matrix(variant):
    check(variant)
    compiled.cache_clear()
