// The ranks that this process runs on CUDA devices: what Python registers, what handlers look up.

#ifndef JAX_LATENT_TAIL_CUDA_RANK_H_
#define JAX_LATENT_TAIL_CUDA_RANK_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "call.h"
#include "cuda_driver.h"

// C interface for `native.py`, which declares the same structs. `struct_size` is sizeof, so that a
// library and a package of different versions refuse each other.
extern "C" {

struct latent_tail_cuda_kernel {
  void* function;       // CUfunction, loaded in the device's primary context
  uint32_t cluster;     // CTAs per cluster
  uint32_t threads;     // per CTA
  uint32_t smem_bytes;  // dynamic shared memory per CTA
  uint32_t reserved;
};

struct latent_tail_cuda_plan {  // how a call of some number of tokens is launched
  uint32_t kernel;              // index into kernels
  uint32_t token_ctas;          // gridDim.x
};

// Everything is copied, the memory that addresses refer to excepted: that lives as long as the
// process.
struct latent_tail_cuda_rank {
  uint64_t struct_size;
  const int64_t* devices;  // global device ids, row-major [groups, tp]
  uint64_t num_devices;
  int64_t tp, latent_dim, hidden_dim, top_k, max_tokens;
  const struct latent_tail_cuda_kernel* kernels;
  uint64_t num_kernels;
  const struct latent_tail_cuda_plan* plans;  // [max_tokens], for 1..max_tokens tokens
  uint64_t control;                           // device address of the control block
  const void* record;                         // the rank's Record, in host memory
  float eps;
  uint32_t fp32_internal;
  uint32_t ordinal;  // of the device in this process
  uint32_t rank;     // in its group
  uint32_t call_hash;
  uint32_t slots;  // in each buffer of the workspace
  uint32_t pdl;    // nonzero: launch with programmatic stream serialization
  uint32_t gathers, has_residual;
};

}  // extern "C"

namespace latent_tail::cuda {

// One registered rank. Never freed: captured graphs and late handlers may come back to it.
struct Rank {
  Spec spec;
  std::vector<int64_t> devices;
  std::vector<latent_tail_cuda_kernel> kernels;
  std::vector<latent_tail_cuda_plan> plans;
  uint64_t control = 0;
  const volatile uint32_t* failure_code = nullptr;  // Record.code: nonzero after a failure
  const volatile uint32_t* failed_ranks = nullptr;  // Record.ranks
  uint32_t ordinal = 0;
  uint32_t rank = 0;
  uint32_t call_hash = 0;
  uint32_t slots = 0;
  bool pdl = false;
  std::atomic<bool> closed{false};
  const Rank* next = nullptr;
};

// The latest rank registered for these attributes on this device, or null. Takes no lock.
const Rank* FindRank(const Attributes& attributes, int32_t ordinal);

// Why no call may be made on this rank any more.
ffi::Error CheckUsable(const Rank& rank, const Attributes& attributes);

// Enqueues one call.
ffi::Error Launch(const Driver& driver, const Rank& rank, const Buffers& buffers, CUstream stream);

}  // namespace latent_tail::cuda

#endif  // JAX_LATENT_TAIL_CUDA_RANK_H_
