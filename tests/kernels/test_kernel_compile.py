"""What the compiler makes of the kernel: parameters, memory traffic, resources. No GPU needed."""

import functools
import re

import pytest
from kernel_variants import CHOSEN, MATRIX

from jax_latent_tail.kernels import abi, geometry
from jax_latent_tail.kernels.variant import (
    ALL_GATHER_ADD,
    MULTICAST,
    TAIL,
    UP_GATHER_ADD,
    UP_STEP,
    KernelVariant,
)

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
        assert kernel["smem_bytes"] == shape.smem_bytes
        assert kernel["stack_bytes"] <= most_stack(variant, shape)
        assert not re.search(r"\b(ld|st)\.local", body)
        assert kernel["registers"] * shape.threads * max(shape.ctas_per_sm, 1) <= 65536
        if variant.op != UP_GATHER_ADD:  # which fills them with its stripe
            assert kernel["registers"] <= (168 if variant.tp > 8 else 128)
        check_memory(variant, body)
        CHECKS[variant.op](variant, shape, body)
        # The header is sent and compared: of what travels only it has this word of the call.
        loads = rf"ld\.param\.b32\s+(%r\d+), \[{kernel['symbol']}_param_15\]"
        call_hash = "|".join(re.findall(loads, body))
        if variant.op == UP_GATHER_ADD:
            store = MULTIMEM_STORE if variant.publish == MULTICAST else VECTOR_STORE
            assert re.search(rf"{store} \[\S+\], \{{({call_hash}),", body)
        else:
            assert re.search(rf"selp\.b32\s+%r\d+, ({call_hash}), %r\d+,", body)
        if variant.op != UP_GATHER_ADD or variant.tp > 1:
            assert re.search(rf"xor\.b32\s+%r\d+, %r\d+, ({call_hash});", body)


def most_stack(variant, shape):
    """Nothing spills, but for what ptxas parks for later where it aims at more CTAs an SM: of its
    own accord, with many expert rows or ranks or a short product, or because it has to."""
    if shape.ctas_per_sm:
        return 64
    many = variant.top_k or (variant.op == ALL_GATHER_ADD and variant.tp >= 8)
    short = variant.op == UP_GATHER_ADD and variant.latent <= UP_STEP
    long = variant.op == UP_GATHER_ADD and variant.latent > 3584  # in several passes
    return 24 if long else 16 if many or short else 0


def check_memory(variant, body):
    # Nothing of the call happens before the wait for the preceding kernel.
    before, _, after = body.partition("griddepcontrol.wait;")
    assert after
    assert not re.search(r"\b(ld|st|atom|red|multimem)\.(?!param)", before)
    halves = 1 if variant.op != TAIL else (variant.latent > 0) + (variant.hidden > 0)
    assert count("griddepcontrol.launch_dependents", body) == halves * variant.trigger
    # No vector is read or written in a way that a peer could miss or a cache could keep.
    assert not re.search(r"ld\.(volatile|global\.nc)|st\.volatile|ld\.global\.ca", body)
    # Subnormals keep their value in sums and when they are rounded; no call ends the context.
    assert not re.search(r"\b(add|sub|mul|fma|cvt)\.\S*ftz|\btrap\b|\bbrkpt\b", body)


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


def check_up(variant, shape, body):
    groups, tp = shape.tokens // 8, variant.tp
    rounds = -(-groups // 2)  # tokens that a thread finishes
    multicast = variant.publish == MULTICAST
    # Every row of the stripe is loaded once: all passes of the first tile, or of a later one, with
    # the first pass in a place of its own.
    steps = -(-variant.latent // UP_STEP // (shape.cluster * shape.warps))
    loads = count(r"ld\.global\.L1::no_allocate\.v4\.u32", body)
    passes = next(n for n in range(1, 9) if -(-steps // n) * 4 * (n + 1) == loads)
    assert -(-steps // passes) * 16 <= 128, "registers of a thread for what is on the way"
    assert count(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16", body) == steps * 4 * groups
    # What is taken: a vector and a header at a time, from one place in the code.
    rearmed = count(VECTOR_STORE + r" \[\S+\], \{s,s,s,s\}", body)
    assert rearmed == count(VECTOR_POLL, body) == (2 if tp > 1 else 0)
    # What is published: a header and the vectors.
    assert count(MULTIMEM_STORE, body) == count(r"multimem\.", body) == (1 + rounds) * multicast
    assert count(VECTOR_STORE, body) - rearmed == (1 + rounds) * (not multicast)
    # The residual, and the output: computed, taken, NaN. Of other plain stores only that of the
    # generation: what peers may read or write is never stored to by one.
    assert count(r"\bld\.global\.v4\.u32", body) == rounds + (tp > 1)
    assert count(r"\bst\.global\.v4\.u32", body) == rounds + (tp > 1) + 1
    assert count(r"\bst\.global\.(?!v4\.u32)", body) == count(r"\bst\.global\.u32", body) == 1
    # Waits: for peers, which looks at the clock, and for stores that the cluster's warps all make.
    assert count("globaltimer", body) == (tp > 1)
    assert count(r"mbarrier\.try_wait", body) == count(r"mbarrier\.arrive\.expect_tx", body) == 2
    assert count(r"mbarrier\.init", body) == 3
    assert count(r"st\.async\.shared::cluster", body) == 2
    # Arrived at before the first tile and, if there is another, after each.
    assert count(r"barrier\.cluster\.arrive", body) == 2
    assert count(r"barrier\.cluster\.wait", body) == 1
    # What is copied past the registers is waited for.
    assert count(r"cp\.async\.cg", body) == count(r"cp\.async\.wait_all", body) == 1


CHECKS = {TAIL: check_tail, ALL_GATHER_ADD: check_gather, UP_GATHER_ADD: check_up}


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


@every([CHOSEN[0], CHOSEN[-1]])
def test_the_same_source_gives_the_same_bytes(variant):
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
