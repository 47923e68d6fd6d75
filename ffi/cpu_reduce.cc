#include "cpu_reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

namespace latent_tail::cpu {
namespace {

// Bodies are inlined into one wrapper per instruction set, below; the compiler vectorises them.
#define LATENT_TAIL_INLINE inline __attribute__((always_inline))

// Flushes subnormal operands and results while it lives. It also keeps the microcode's assists for
// them, a hundred times slower than an addition, out of the loops.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : saved_(_mm_getcsr()) {
    _mm_setcsr(saved_ | kFlushToZero | kSubnormalsAreZero);
  }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlushToZero = 1u << 15;
  static constexpr unsigned kSubnormalsAreZero = 1u << 6;
  unsigned saved_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | kFlushToZero));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  static constexpr uint64_t kFlushToZero = uint64_t{1} << 24;
  uint64_t saved_;
#endif
};

LATENT_TAIL_INLINE float ToFloat(uint32_t bf16) {
  uint32_t bits = bf16 << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// To nearest, ties to even; a NaN stays one, and quiet.
LATENT_TAIL_INLINE uint16_t ToBf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  uint32_t quiet = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? quiet : rounded);
}

LATENT_TAIL_INLINE float Round(float value) { return ToFloat(ToBf16(value)); }

// total[c] = (fresh ? +0 : total[c]) + rows[0][first + c] + ... + rows[N - 1][first + c], in this
// order.
template <int N>
LATENT_TAIL_INLINE void Accumulate(const uint16_t* const* rows, bool fresh, int64_t first,
                                   int64_t columns, float* __restrict total) {
  const uint16_t* row[N];
  for (int n = 0; n < N; ++n) row[n] = rows[n] + first;
  if (fresh) {
    for (int64_t c = 0; c < columns; ++c) {
      float sum = 0.0f;
      for (int n = 0; n < N; ++n) sum += ToFloat(row[n][c]);
      total[c] = sum;
    }
  } else {
    for (int64_t c = 0; c < columns; ++c) {
      float sum = total[c];
      for (int n = 0; n < N; ++n) sum += ToFloat(row[n][c]);
      total[c] = sum;
    }
  }
}

// Rows are added up to eight at a time: so the sums pass through memory once for eight ranks.
LATENT_TAIL_INLINE void OrderedSum(const uint16_t* const* rows, int64_t num_rows, int64_t first,
                                   int64_t columns, float* total) {
  for (int64_t n = 0; n < num_rows; n += 8) {
    const uint16_t* const* some = rows + n;
    switch (std::min<int64_t>(num_rows - n, 8)) {
      case 1:
        Accumulate<1>(some, n == 0, first, columns, total);
        break;
      case 2:
        Accumulate<2>(some, n == 0, first, columns, total);
        break;
      case 3:
        Accumulate<3>(some, n == 0, first, columns, total);
        break;
      case 4:
        Accumulate<4>(some, n == 0, first, columns, total);
        break;
      case 5:
        Accumulate<5>(some, n == 0, first, columns, total);
        break;
      case 6:
        Accumulate<6>(some, n == 0, first, columns, total);
        break;
      case 7:
        Accumulate<7>(some, n == 0, first, columns, total);
        break;
      default:
        Accumulate<8>(some, n == 0, first, columns, total);
        break;
    }
  }
}

constexpr int64_t kBlock = 1024;  // columns whose sums stay in the first-level cache

LATENT_TAIL_INLINE void SumBody(const uint16_t* const* rows, int64_t num_rows, int64_t first,
                                int64_t columns, uint16_t* __restrict out) {
  float total[kBlock];
  for (int64_t start = 0; start < columns; start += kBlock) {
    int64_t width = std::min(kBlock, columns - start);
    OrderedSum(rows, num_rows, first + start, width, total);
    for (int64_t c = 0; c < width; ++c) out[start + c] = ToBf16(total[c]);
  }
}

// Replaces x by what is normalised and returns the sum of the squares. The lanes are the order of
// the row sum, which the contract leaves free, so that it need not be a chain of additions.
template <bool kFp32Internal>
LATENT_TAIL_INLINE float RoundAndSumSquares(int64_t columns, float* __restrict x) {
  constexpr int kLanes = 32;
  float lanes[kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      float value = kFp32Internal ? x[c + lane] : Round(x[c + lane]);
      x[c + lane] = value;
      lanes[lane] += kFp32Internal ? value * value : Round(value * value);
    }
  }
  for (int lane = 0; c < columns; ++c, ++lane) {
    x[c] = kFp32Internal ? x[c] : Round(x[c]);
    lanes[lane] += kFp32Internal ? x[c] * x[c] : Round(x[c] * x[c]);
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

LATENT_TAIL_INLINE void SumAndNormBody(const uint16_t* const* rows, int64_t num_rows,
                                       const uint16_t* gamma, int64_t columns, float eps,
                                       bool fp32_internal, float* x, uint16_t* __restrict out) {
  OrderedSum(rows, num_rows, 0, columns, x);
  float square_sum =
      fp32_internal ? RoundAndSumSquares<true>(columns, x) : RoundAndSumSquares<false>(columns, x);
  float inverse_rms = 1.0f / std::sqrt(square_sum / static_cast<float>(columns) + eps);
  for (int64_t c = 0; c < columns; ++c) out[c] = ToBf16(x[c] * inverse_rms * ToFloat(gamma[c]));
}

LATENT_TAIL_INLINE void FinalizeBody(const uint16_t* permuted, int64_t permuted_rows,
                                     const uint16_t* weights, const int32_t* indices, int64_t top_k,
                                     int64_t columns, float* __restrict total,
                                     uint16_t* __restrict out) {
  std::fill_n(total, columns, 0.0f);
  for (int64_t k = 0; k < top_k; ++k) {
    if (indices[k] < 0) continue;
    if (indices[k] >= permuted_rows) {
      std::fill_n(total, columns, std::nanf(""));
      continue;
    }
    const uint16_t* row = permuted + indices[k] * columns;
    float weight = ToFloat(weights[k]);
    for (int64_t c = 0; c < columns; ++c) total[c] += weight * ToFloat(row[c]);
  }
  for (int64_t c = 0; c < columns; ++c) out[c] = ToBf16(total[c]);
}

LATENT_TAIL_INLINE void AddBody(const uint16_t* left, const uint16_t* right, int64_t columns,
                                uint16_t* __restrict out) {
  for (int64_t c = 0; c < columns; ++c) out[c] = ToBf16(ToFloat(left[c]) + ToFloat(right[c]));
}

// Table of the bodies compiled for one instruction set.
struct Functions {
  decltype(&Sum) sum;
  void (*sum_and_norm)(const uint16_t* const*, int64_t, const uint16_t*, int64_t, float, bool,
                       float*, uint16_t*);
  void (*finalize)(const uint16_t*, int64_t, const uint16_t*, const int32_t*, int64_t, int64_t,
                   float*, uint16_t*);
  decltype(&Add) add;
};

#define LATENT_TAIL_FUNCTIONS(NAME, TARGET)                                                  \
  TARGET void Sum##NAME(const uint16_t* const* rows, int64_t num_rows, int64_t first,        \
                        int64_t columns, uint16_t* out) {                                    \
    SumBody(rows, num_rows, first, columns, out);                                            \
  }                                                                                          \
  TARGET void SumAndNorm##NAME(const uint16_t* const* rows, int64_t num_rows,                \
                               const uint16_t* gamma, int64_t columns, float eps,            \
                               bool fp32_internal, float* x, uint16_t* out) {                \
    SumAndNormBody(rows, num_rows, gamma, columns, eps, fp32_internal, x, out);              \
  }                                                                                          \
  TARGET void Finalize##NAME(const uint16_t* permuted, int64_t permuted_rows,                \
                             const uint16_t* weights, const int32_t* indices, int64_t top_k, \
                             int64_t columns, float* total, uint16_t* out) {                 \
    FinalizeBody(permuted, permuted_rows, weights, indices, top_k, columns, total, out);     \
  }                                                                                          \
  TARGET void Add##NAME(const uint16_t* left, const uint16_t* right, int64_t columns,        \
                        uint16_t* out) {                                                     \
    AddBody(left, right, columns, out);                                                      \
  }                                                                                          \
  constexpr Functions k##NAME = {Sum##NAME, SumAndNorm##NAME, Finalize##NAME, Add##NAME};

LATENT_TAIL_FUNCTIONS(Baseline, )
#if defined(__x86_64__)
// Twice as fast as the baseline's SSE2 on [8, 3584]; AVX-512 gave a fifth more and is not worth it.
// Chosen by hand and not with target_clones, whose resolvers run before a sanitizer is ready.
LATENT_TAIL_FUNCTIONS(Avx2, __attribute__((target("avx2"))))
#endif

#if defined(__x86_64__)
// By hand, as __builtin_cpu_supports is always false with zig's run-time library.
bool HasAvx2() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE)) return false;
  unsigned low, high;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kXmmAndYmm = 6;  // the system saves both
  if ((low & kXmmAndYmm) != kXmmAndYmm) return false;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & bit_AVX2);
}
#endif

const Functions& BestFunctions() {
  static const Functions* best = [] {
#if defined(__x86_64__)
    if (HasAvx2()) return &kAvx2;
#endif
    return &kBaseline;
  }();
  return *best;
}

// One row of fp32 per thread, kept from call to call.
float* Scratch(int64_t columns) {
  thread_local std::vector<float> scratch;
  if (scratch.size() < static_cast<size_t>(columns)) scratch.resize(columns);
  return scratch.data();
}

}  // namespace

void Finalize(const uint16_t* permuted, int64_t permuted_rows, const uint16_t* weights,
              const int32_t* indices, int64_t top_k, int64_t columns, uint16_t* out) {
  FlushSubnormals flush;
  BestFunctions().finalize(permuted, permuted_rows, weights, indices, top_k, columns,
                           Scratch(columns), out);
}

void Sum(const uint16_t* const* rows, int64_t num_rows, int64_t first, int64_t columns,
         uint16_t* out) {
  FlushSubnormals flush;
  BestFunctions().sum(rows, num_rows, first, columns, out);
}

void SumAndNorm(const uint16_t* const* rows, int64_t num_rows, const uint16_t* gamma,
                int64_t columns, float eps, bool fp32_internal, uint16_t* out) {
  FlushSubnormals flush;
  BestFunctions().sum_and_norm(rows, num_rows, gamma, columns, eps, fp32_internal, Scratch(columns),
                               out);
}

void Add(const uint16_t* left, const uint16_t* right, int64_t columns, uint16_t* out) {
  FlushSubnormals flush;
  BestFunctions().add(left, right, columns, out);
}

}  // namespace latent_tail::cpu
