"""The few PTX operations that the kernels need, by name.

Every access to memory is volatile assembly: the compiler keeps their order, so nothing crosses
`griddepcontrol.wait` and no load of a value that peers write is cached in a register. Addresses are
`Int64` (global) or `Int32` (shared memory) byte addresses; a *vector* is four 32-bit words, 16-byte
aligned.
"""

from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from jax_latent_tail.kernels.abi import ESCAPED, OTHER_NAN, SENTINEL

_SENTINEL, _ESCAPED = f"0x{SENTINEL:08x}", f"0x{ESCAPED:08x}"


def _asm(result, operands, text, constraints, loc, ip, volatile=True):
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    return llvm.inline_asm(
        result,
        values,
        text,
        constraints,
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _vector(operands, text, constraints, loc, ip):
    out = _asm(llvm.StructType.get_literal([T.i32()] * 4), operands, text, constraints, loc, ip)
    return tuple(Uint32(llvm.extractvalue(T.i32(), out, [i], loc=loc, ip=ip)) for i in range(4))


# ---- global memory that only this call's stream writes


@dsl_user_op
def load_vector(address: Int64, *, loc=None, ip=None):
    """Four words of an input."""
    text = "ld.global.v4.u32 {$0,$1,$2,$3}, [$4];"
    return _vector([address], text, "=r,=r,=r,=r,l", loc, ip)


@dsl_user_op
def load_vector_if(address: Int64, active: Uint32, *, loc=None, ip=None):
    """The same; unread, zeros where `active` is zero."""
    text = (
        "{.reg .pred p; setp.ne.u32 p, $5, 0;"
        " mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
        " @p ld.global.v4.u32 {$0,$1,$2,$3}, [$4];}"
    )
    return _vector([address, active], text, "=&r,=&r,=&r,=&r,l,r", loc, ip)


@dsl_user_op
def load_row_vector(address: Int64, index: Int32, rows: Int32, *, loc=None, ip=None):
    """Four words of row `index`; unread, zeros if index < 0, NaNs if index >= rows."""
    text = (
        "{.reg .pred in, over; .reg .b32 fill;"
        " setp.lt.u32 in, $5, $6;"
        " setp.ge.s32 over, $5, $6;"
        " selp.b32 fill, 0x7fff7fff, 0, over;"
        " mov.b32 $0, fill; mov.b32 $1, fill; mov.b32 $2, fill; mov.b32 $3, fill;"
        " @in ld.global.v4.u32 {$0,$1,$2,$3}, [$4];}"
    )
    return _vector([address, index, rows], text, "=&r,=&r,=&r,=&r,l,r,r", loc, ip)


@dsl_user_op
def load_word(address: Int64, *, loc=None, ip=None) -> Uint32:
    return Uint32(_asm(T.i32(), [address], "ld.global.u32 $0, [$1];", "=r,l", loc, ip))


@dsl_user_op
def load_half(address: Int64, *, loc=None, ip=None) -> Uint32:
    """One bf16, in the low half of the word."""
    text = "{.reg .b16 h; ld.global.u16 h, [$1]; cvt.u32.u16 $0, h;}"
    return Uint32(_asm(T.i32(), [address], text, "=r,l", loc, ip))


@dsl_user_op
def store_vector(
    address: Int64, w0: Uint32, w1: Uint32, w2: Uint32, w3: Uint32, *, loc=None, ip=None
):
    """Four words of an output."""
    text = "st.global.v4.u32 [$0], {$1,$2,$3,$4};"
    _asm(None, [address, w0, w1, w2, w3], text, "l,r,r,r,r", loc, ip)


@dsl_user_op
def store_vector_if(
    address: Int64,
    active: Uint32,
    w0: Uint32,
    w1: Uint32,
    w2: Uint32,
    w3: Uint32,
    *,
    loc=None,
    ip=None,
):
    """The same; nothing where `active` is zero."""
    text = "{.reg .pred p; setp.ne.u32 p, $1, 0; @p st.global.v4.u32 [$0], {$2,$3,$4,$5};}"
    _asm(None, [address, active, w0, w1, w2, w3], text, "l,r,r,r,r,r", loc, ip)


@dsl_user_op
def store_word(address: Int64, value: Uint32, *, loc=None, ip=None):
    _asm(None, [address, value], "st.global.u32 [$0], $1;", "l,r", loc, ip)


# ---- global memory that others write or read while we run


@dsl_user_op
def poll_vector(
    address: Int64,
    active: Uint32,
    w0: Uint32,
    w1: Uint32,
    w2: Uint32,
    w3: Uint32,
    *,
    loc=None,
    ip=None,
):
    """Four words as they are in memory now; w0..w3 unread where `active` is zero."""
    text = (
        "{.reg .pred p; setp.ne.u32 p, $5, 0;"
        " mov.b32 $0, $6; mov.b32 $1, $7; mov.b32 $2, $8; mov.b32 $3, $9;"
        " @p ld.relaxed.sys.global.v4.u32 {$0,$1,$2,$3}, [$4];}"
    )
    return _vector([address, active, w0, w1, w2, w3], text, "=&r,=&r,=&r,=&r,l,r,r,r,r,r", loc, ip)


@dsl_user_op
def rearm_vector(address: Int64, active: Uint32, *, loc=None, ip=None):
    """The sentinel into four words of the own workspace; nothing where `active` is zero."""
    text = (
        "{.reg .pred p; .reg .b32 s; setp.ne.u32 p, $1, 0; mov.b32 s, " + _SENTINEL + ";"
        " @p st.relaxed.sys.global.v4.u32 [$0], {s,s,s,s};}"
    )
    _asm(None, [address, active], text, "l,r", loc, ip)


@dsl_user_op
def publish_vector(
    address: Int64,
    active: Uint32,
    w0: Uint32,
    w1: Uint32,
    w2: Uint32,
    w3: Uint32,
    *,
    loc=None,
    ip=None,
):
    """Four words into one peer's workspace; nothing where `active` is zero."""
    text = (
        "{.reg .pred p; setp.ne.u32 p, $1, 0; @p st.relaxed.sys.global.v4.u32 [$0], {$2,$3,$4,$5};}"
    )
    _asm(None, [address, active, w0, w1, w2, w3], text, "l,r,r,r,r,r", loc, ip)


@dsl_user_op
def multicast_vector(
    address: Int64, w0: Uint32, w1: Uint32, w2: Uint32, w3: Uint32, *, loc=None, ip=None
):
    """Four words into every rank's workspace, through the multicast mapping only."""
    text = "multimem.st.relaxed.sys.global.v4.bf16x2 [$0], {$1,$2,$3,$4};"
    _asm(None, [address, w0, w1, w2, w3], text, "l,r,r,r,r", loc, ip)


@dsl_user_op
def load_shared_word(address: Int64, *, loc=None, ip=None) -> Uint32:
    """A word that other kernels, other ranks or the host may be writing."""
    text = "ld.relaxed.sys.global.u32 $0, [$1];"
    return Uint32(_asm(T.i32(), [address], text, "=r,l", loc, ip))


@dsl_user_op
def load_shared_long(address: Int64, *, loc=None, ip=None) -> Int64:
    """A pointer or a duration that the host may be writing."""
    text = "ld.relaxed.sys.global.u64 $0, [$1];"
    return Int64(_asm(T.i64(), [address], text, "=l,l", loc, ip))


@dsl_user_op
def load_shared_longs(address: Int64, *, loc=None, ip=None):
    """Two of them, 16-byte aligned."""
    out = _asm(
        llvm.StructType.get_literal([T.i64()] * 2),
        [address],
        "ld.relaxed.sys.global.v2.u64 {$0,$1}, [$2];",
        "=l,=l,l",
        loc,
        ip,
    )
    return tuple(Int64(llvm.extractvalue(T.i64(), out, [i], loc=loc, ip=ip)) for i in range(2))


@dsl_user_op
def store_shared_word(address: Int64, value: Uint32, *, loc=None, ip=None):
    """A word for another rank or the host to see."""
    _asm(None, [address, value], "st.relaxed.sys.global.u32 [$0], $1;", "l,r", loc, ip)


@dsl_user_op
def store_shared_long(address: Int64, value: Int64, *, loc=None, ip=None):
    _asm(None, [address, value], "st.relaxed.sys.global.u64 [$0], $1;", "l,l", loc, ip)


@dsl_user_op
def release_shared_word(address: Int64, value: Uint32, *, loc=None, ip=None):
    """The same, after everything that this thread stored before."""
    _asm(None, [address, value], "st.release.sys.global.u32 [$0], $1;", "l,r", loc, ip)


@dsl_user_op
def claim(address: Int64, *, loc=None, ip=None) -> Uint32:
    """Set the word from 0 to 1; returns what it was, 0 to the one thread that has it now."""
    text = "atom.relaxed.sys.global.cas.b32 $0, [$1], 0, 1;"
    return Uint32(_asm(T.i32(), [address], text, "=r,l", loc, ip))


@dsl_user_op
def global_timer(*, loc=None, ip=None) -> Int64:
    """Nanoseconds of the GPU's clock."""
    return Int64(_asm(T.i64(), [], "mov.u64 $0, %globaltimer;", "=l", loc, ip))


# ---- distributed shared memory: words for the CTAs of a cluster, counted in by an mbarrier


@dsl_user_op
def barrier_init(barrier: Int32, *, loc=None, ip=None):
    """An mbarrier whose phase ends with one arrival and the bytes that it announced."""
    _asm(None, [barrier], "mbarrier.init.shared::cta.b64 [$0], 1;", "r", loc, ip)


@dsl_user_op
def barrier_init_fence(*, loc=None, ip=None):
    """Makes initialised mbarriers visible to the cluster, with the cluster arrive that follows."""
    _asm(None, [], "fence.mbarrier_init.release.cluster;", "", loc, ip)


@dsl_user_op
def barrier_expect(barrier: Int32, count: Int32, *, loc=None, ip=None):
    """The phase's one arrival: `count` bytes will be stored."""
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    _asm(None, [barrier, count], text, "r,r", loc, ip)


@dsl_user_op
def barrier_wait(barrier: Int32, parity: Int32, *, loc=None, ip=None):
    """Wait for the phase. Bounded: the cluster's warps all send, whatever happened to them."""
    text = (
        "{.reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra WAIT;}"
    )
    _asm(None, [barrier, parity], text, "r,r", loc, ip)


@dsl_user_op
def map_to_cta(address: Int32, cta: Int32, *, loc=None, ip=None) -> Int32:
    """The same shared memory address in another CTA of the cluster."""
    text = "mapa.shared::cluster.u32 $0, $1, $2;"
    return Int32(_asm(T.i32(), [address, cta], text, "=r,r,r", loc, ip, volatile=False))


@dsl_user_op
def send_float(address: Int32, value: Float32, barrier: Int32, *, loc=None, ip=None):
    """Store into a CTA of the cluster and count 4 bytes on that CTA's mbarrier."""
    text = "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [$0], $1, [$2];"
    _asm(None, [address, value, barrier], text, "r,f,r", loc, ip)


@dsl_user_op
def store_smem_float(address: Int32, value: Float32, *, loc=None, ip=None):
    """A word into the own CTA's shared memory."""
    _asm(None, [address, value], "st.shared.f32 [$0], $1;", "r,f", loc, ip)


@dsl_user_op
def load_smem_float(address: Int32, *, loc=None, ip=None) -> Float32:
    return Float32(_asm(T.f32(), [address], "ld.shared.f32 $0, [$1];", "=f,r", loc, ip))


@dsl_user_op
def load_smem_floats(address: Int32, *, loc=None, ip=None):
    """Four floats, 16-byte aligned."""
    out = _asm(
        llvm.StructType.get_literal([T.f32()] * 4),
        [address],
        "ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];",
        "=f,=f,=f,=f,r",
        loc,
        ip,
    )
    return tuple(Float32(llvm.extractvalue(T.f32(), out, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def exit_if(flag: Uint32, *, loc=None, ip=None):
    """End the thread here if `flag` is nonzero."""
    _asm(None, [flag], "{.reg .pred p; setp.ne.u32 p, $0, 0; @p exit;}", "r", loc, ip)


@dsl_user_op
def any_lane(flag: Uint32, *, loc=None, ip=None) -> Uint32:
    """1 if `flag` is nonzero in any lane of the (whole) warp."""
    text = (
        "{.reg .pred p, q; setp.ne.u32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff;"
        " selp.b32 $0, 1, 0, q;}"
    )
    return Uint32(_asm(T.i32(), [flag], text, "=r,r", loc, ip))


# ---- words and numbers


def _pure(result, operands, text, constraints, loc, ip):
    return _asm(result, operands, text, constraints, loc, ip, volatile=False)


@dsl_user_op
def low(word: Uint32, *, loc=None, ip=None) -> Float32:
    """The bf16 in the low half."""
    return Float32(_pure(T.f32(), [word], "shl.b32 $0, $1, 16;", "=f,r", loc, ip))


@dsl_user_op
def high(word: Uint32, *, loc=None, ip=None) -> Float32:
    """The bf16 in the high half."""
    return Float32(_pure(T.f32(), [word], "and.b32 $0, $1, 0xffff0000;", "=f,r", loc, ip))


@dsl_user_op
def pack(lo: Float32, hi: Float32, *, loc=None, ip=None) -> Uint32:
    """Two floats rounded to bf16. Any NaN becomes 0x7fff."""
    text = "cvt.rn.bf16x2.f32 $0, $1, $2;"
    return Uint32(_pure(T.i32(), [hi, lo], text, "=r,f,f", loc, ip))


@dsl_user_op
def as_word(value: Float32, *, loc=None, ip=None) -> Uint32:
    return Uint32(_pure(T.i32(), [value], "mov.b32 $0, $1;", "=r,f", loc, ip))


@dsl_user_op
def as_float(word: Uint32, *, loc=None, ip=None) -> Float32:
    return Float32(_pure(T.f32(), [word], "mov.b32 $0, $1;", "=f,r", loc, ip))


# Compared as integers: floating compares may flush subnormals, and -0 == +0.


@dsl_user_op
def trailing_zeros(word: Uint32, *, loc=None, ip=None) -> Uint32:
    """Index of the lowest set bit."""
    text = "{.reg .b32 t; brev.b32 t, $1; clz.b32 $0, t;}"
    return Uint32(_pure(T.i32(), [word], text, "=r,r", loc, ip))


@dsl_user_op
def opaque(value: Int32, *, loc=None, ip=None) -> Int32:
    """The value, of which the compiler knows nothing and which it does not move."""
    return Int32(_asm(T.i32(), [value], "mov.b32 $0, $1;", "=r,r", loc, ip))


@dsl_user_op
def is_nan(value: Float32, *, loc=None, ip=None) -> Uint32:
    """1 for a NaN."""
    text = "{.reg .pred p; testp.notanumber.f32 p, $1; selp.b32 $0, 1, 0, p;}"
    return Uint32(_pure(T.i32(), [value], text, "=r,f", loc, ip))


@dsl_user_op
def without_sentinel(word: Uint32, *, loc=None, ip=None) -> Uint32:
    """The word, or +0, +0 where it equals the sentinel."""
    text = "{.reg .pred p; setp.eq.u32 p, $1, " + _SENTINEL + "; selp.b32 $0, 0, $1, p;}"
    return Uint32(_pure(T.i32(), [word], text, "=r,r", loc, ip))


@dsl_user_op
def escaped(word: Uint32, *, loc=None, ip=None) -> Uint32:
    """How a word that is copied travels: never as the sentinel."""
    text = (
        f"{{.reg .pred p; .reg .b32 t; setp.eq.u32 p, $1, {_ESCAPED};"
        f" selp.b32 t, 0x{OTHER_NAN:08x}, $1, p;"
        f" setp.eq.u32 p, $1, {_SENTINEL}; selp.b32 $0, {_ESCAPED}, t, p;}}"
    )
    return Uint32(_pure(T.i32(), [word], text, "=r,r", loc, ip))


@dsl_user_op
def unescaped(word: Uint32, *, loc=None, ip=None) -> Uint32:
    """The word again."""
    text = f"{{.reg .pred p; setp.eq.u32 p, $1, {_ESCAPED}; selp.b32 $0, {_SENTINEL}, $1, p;}}"
    return Uint32(_pure(T.i32(), [word], text, "=r,r", loc, ip))


@dsl_user_op
def any_sentinel(w0: Uint32, w1: Uint32, w2: Uint32, w3: Uint32, *, loc=None, ip=None) -> Uint32:
    """1 if any word has not arrived."""
    text = (
        "{.reg .pred p;"
        f" setp.eq.u32 p, $1, {_SENTINEL}; setp.eq.or.u32 p, $2, {_SENTINEL}, p;"
        f" setp.eq.or.u32 p, $3, {_SENTINEL}, p; setp.eq.or.u32 p, $4, {_SENTINEL}, p;"
        " selp.b32 $0, 1, 0, p;}"
    )
    return Uint32(_pure(T.i32(), [w0, w1, w2, w3], text, "=r,r,r,r,r", loc, ip))


# ---- products


@dsl_user_op
def stream_vector_if(address: Int64, active: Uint32, *, loc=None, ip=None):
    """Four words that are read once, past the L1 cache; zeros where `active` is zero."""
    text = (
        "{.reg .pred p; setp.ne.u32 p, $5, 0;"
        " mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
        " @p ld.global.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4];}"
    )
    return _vector([address, active], text, "=&r,=&r,=&r,=&r,l,r", loc, ip)


@dsl_user_op
def copy_vector_async(to: Int32, address: Int64, count: Uint32, *, loc=None, ip=None):
    """Four words into shared memory, zeros from byte `count` on: there after `copies_arrived`."""
    text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    _asm(None, [to, address, count], text, "r,l,r", loc, ip)


@dsl_user_op
def copies_arrived(*, loc=None, ip=None):
    """Wait for this thread's copies."""
    _asm(None, [], "cp.async.wait_all;", "", loc, ip)


@dsl_user_op
def load_smem_pair(address: Int32, *, loc=None, ip=None):
    """Two words, 8-byte aligned."""
    struct = llvm.StructType.get_literal([T.i32()] * 2)
    out = _asm(struct, [address], "ld.shared.v2.u32 {$0,$1}, [$2];", "=r,=r,r", loc, ip)
    return tuple(Uint32(llvm.extractvalue(T.i32(), out, [i], loc=loc, ip=ip)) for i in range(2))


@dsl_user_op
def load_half_if(address: Int64, active: Uint32, *, loc=None, ip=None) -> Uint32:
    """One bf16, in the low half of the word; zero where `active` is zero."""
    text = (
        "{.reg .pred p; .reg .b16 h; setp.ne.u32 p, $2, 0; mov.b16 h, 0;"
        " @p ld.global.u16 h, [$1]; cvt.u32.u16 $0, h;}"
    )
    return Uint32(_asm(T.i32(), [address, active], text, "=r,l,r", loc, ip))


@dsl_user_op
def lows(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    """The low halves of two words, a's below."""
    return Uint32(_pure(T.i32(), [a, b], "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", loc, ip))


@dsl_user_op
def highs(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    """The high halves of two words, a's below."""
    return Uint32(_pure(T.i32(), [a, b], "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", loc, ip))


@dsl_user_op
def multiply_add(a, b, c, *, loc=None, ip=None):
    """c [16, 8] fp32 + a [16, 16] bf16 @ b [16, 8] bf16, in the fragments of `mma.m16n8k16`."""
    out = _asm(
        llvm.StructType.get_literal([T.f32()] * 4),
        [*a, *b, *c],
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        " {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        loc,
        ip,
    )
    return tuple(Float32(llvm.extractvalue(T.f32(), out, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def store_smem_floats(
    address: Int32, v0: Float32, v1: Float32, v2: Float32, v3: Float32, *, loc=None, ip=None
):
    """Four floats into the own CTA's shared memory, 16-byte aligned."""
    text = "st.shared.v4.f32 [$0], {$1,$2,$3,$4};"
    _asm(None, [address, v0, v1, v2, v3], text, "r,f,f,f,f", loc, ip)


@dsl_user_op
def send_floats(
    address: Int32,
    v0: Float32,
    v1: Float32,
    v2: Float32,
    v3: Float32,
    barrier: Int32,
    *,
    loc=None,
    ip=None,
):
    """Store four floats into a CTA of the cluster and count 16 bytes on that CTA's mbarrier."""
    text = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$1,$2,$3,$4}, [$5];"
    _asm(None, [address, v0, v1, v2, v3, barrier], text, "r,f,f,f,f,r", loc, ip)
