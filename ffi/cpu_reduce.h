// The arithmetic of the tail on CPUs, row by row; bf16 words as uint16_t.
//
// Values do not depend on who computes them: every function flushes subnormals, as XLA's own CPU
// code does, whatever the calling thread's floating-point mode is.

#ifndef JAX_LATENT_TAIL_CPU_REDUCE_H_
#define JAX_LATENT_TAIL_CPU_REDUCE_H_

#include <cstdint>

namespace latent_tail::cpu {

// One token's routed row from its expert rows: the fp32 sum, from +0 and over slots in ascending
// order, of weights[k] * permuted[indices[k]], rounded once. A negative index is skipped and its
// row never read; an index from `permuted_rows` on makes the result NaN.
void Finalize(const uint16_t* permuted, int64_t permuted_rows, const uint16_t* weights,
              const int32_t* indices, int64_t top_k, int64_t columns, uint16_t* out);

// out[c] = bf16 of the fp32 sum of rows[0][first + c], rows[1][first + c], ... in this order, from
// +0. `out` may not alias the rows.
void Sum(const uint16_t* const* rows, int64_t num_rows, int64_t first, int64_t columns,
         uint16_t* out);

// The same sum of whole rows, normalised: the contract's RMSNorm of one token.
void SumAndNorm(const uint16_t* const* rows, int64_t num_rows, const uint16_t* gamma,
                int64_t columns, float eps, bool fp32_internal, uint16_t* out);

// out[c] = bf16 of the fp32 sum left[c] + right[c]; where both are -0, so is it. `out` may not
// alias them.
void Add(const uint16_t* left, const uint16_t* right, int64_t columns, uint16_t* out);

}  // namespace latent_tail::cpu

#endif  // JAX_LATENT_TAIL_CPU_REDUCE_H_
