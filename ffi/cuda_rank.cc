#include "cuda_rank.h"

#include <algorithm>
#include <cstddef>
#include <string>

namespace latent_tail::cuda {
namespace {

// The kernel's parameter list and the record's first fields: `kernels/abi.py`, version 1.
struct LaunchParams {
  uint64_t rows, weights, indices, gamma, latent, shared, shard, control;
  int32_t tokens, slots, permuted_rows, top_k, rank, roles, channel;
  uint32_t call_hash;
  float eps;
};
static_assert(sizeof(LaunchParams) == 104 && offsetof(LaunchParams, eps) == 96);

constexpr int32_t kRoutedMask = 1, kSharedMask = 2;
constexpr size_t kRecordCode = 0, kRecordRanks = 5;  // words
constexpr uint32_t kDeadline = 1, kMismatch = 2;
constexpr uintptr_t kAlignment = 16;  // of every array, for the kernel's vectors

std::atomic<Rank*> head{nullptr};

uint64_t Address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

bool Matches(const Rank& rank, const Attributes& attributes, int32_t ordinal) {
  return static_cast<int32_t>(rank.ordinal) == ordinal && rank.spec == attributes.spec &&
         std::equal(rank.devices.begin(), rank.devices.end(), attributes.devices.begin(),
                    attributes.devices.end());
}

std::string RankNumbers(uint32_t bits) {
  std::string text;
  for (int p = 0; p < 32; ++p) {
    if (bits >> p & 1) text += (text.empty() ? "" : ", ") + std::to_string(p);
  }
  return "[" + text + "]";
}

}  // namespace

const Rank* FindRank(const Attributes& attributes, int32_t ordinal) {
  const Rank* rank = head.load(std::memory_order_acquire);
  while (rank && !Matches(*rank, attributes, ordinal)) rank = rank->next;
  return rank;
}

ffi::Error CheckUsable(const Rank& rank, const Attributes& attributes) {
  if (rank.closed.load(std::memory_order_relaxed)) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      "latent_tail: the communicator of " + attributes.ToString() +
                          " is closed; latent_tail.prepare makes a new one");
  }
  const uint32_t code = *rank.failure_code;
  if (!code) return ffi::Error::Success();
  std::string ranks = RankNumbers(*rank.failed_ranks);
  std::string what = code == kDeadline   ? "nothing came from ranks " + ranks + " in time"
                     : code == kMismatch ? "ranks " + ranks + " made a different call"
                                         : "ranks " + ranks + " failed";
  return ffi::Error(
      code == kDeadline ? ffi::ErrorCode::kDeadlineExceeded : ffi::ErrorCode::kAborted,
      "latent_tail: an earlier call failed on rank " + std::to_string(rank.rank) + ": " + what +
          "; its outputs were NaN and no later call is made. latent_tail.check() says more. " +
          attributes.ToString());
}

ffi::Error Launch(const Driver& driver, const Rank& rank, const Buffers& buffers, CUstream stream) {
  const Spec& spec = rank.spec;
  LaunchParams params = {};
  // A gather takes the places of what it resembles: a row of its own for every rank.
  params.rows = Address(spec.gathers ? buffers.residual : buffers.rows);
  params.weights = Address(spec.gathers ? buffers.w_up : buffers.weights);
  params.indices = Address(buffers.indices);
  params.gamma = Address(buffers.gamma);
  params.latent = Address(spec.gathers ? buffers.projected : buffers.latent);
  params.shared = Address(spec.gathers ? buffers.x : buffers.shared);
  params.shard = Address(spec.gathers ? buffers.gathered : buffers.shard);
  const uint64_t arrays[] = {params.rows,   params.weights, params.indices, params.gamma,
                             params.latent, params.shared,  params.shard};
  for (uint64_t address : arrays) {
    if (address % kAlignment != 0) {
      return ffi::Error(ffi::ErrorCode::kInternal,
                        "latent_tail: XLA passed an array that is not aligned to 16 bytes");
    }
  }
  params.control = rank.control;
  params.tokens = static_cast<int32_t>(buffers.tokens);
  params.slots = static_cast<int32_t>(rank.slots);
  params.permuted_rows = static_cast<int32_t>(buffers.permuted_rows);
  params.top_k = static_cast<int32_t>(spec.top_k);
  params.rank = static_cast<int32_t>(rank.rank);
  const bool routed = spec.latent_dim > 0 && !spec.gathers, shared = spec.hidden_dim > 0;
  params.roles = (routed ? kRoutedMask : 0) | (shared ? kSharedMask : 0);
  params.call_hash = rank.call_hash;
  params.eps = spec.eps;
  void* parameters[] = {&params.rows,   &params.weights, &params.indices,       &params.gamma,
                        &params.latent, &params.shared,  &params.shard,         &params.control,
                        &params.tokens, &params.slots,   &params.permuted_rows, &params.top_k,
                        &params.rank,   &params.roles,   &params.channel,       &params.call_hash,
                        &params.eps};

  const latent_tail_cuda_plan& plan = rank.plans[buffers.tokens - 1];
  const latent_tail_cuda_kernel& kernel = rank.kernels[plan.kernel];
  CUlaunchAttribute attributes[2] = {};
  attributes[0].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attributes[0].value.clusterDim = {1, kernel.cluster, 1};
  attributes[1].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attributes[1].value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config = {};
  config.gridDimX = plan.token_ctas;
  config.gridDimY = kernel.cluster;
  config.gridDimZ = routed && shared ? 2 : 1;
  config.blockDimX = kernel.threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = kernel.smem_bytes;
  config.hStream = stream;
  config.attrs = attributes;
  config.numAttrs = rank.pdl ? 2 : 1;
  CUresult status = driver.cuLaunchKernelEx(&config, static_cast<CUfunction>(kernel.function),
                                            parameters, nullptr);
  if (status != CUDA_SUCCESS) {
    return ffi::Error(ffi::ErrorCode::kInternal,
                      "latent_tail: cuLaunchKernelEx: " + driver.ErrorName(status));
  }
  return ffi::Error::Success();
}

}  // namespace latent_tail::cuda

using latent_tail::cuda::Rank;

// Registers a rank and returns it; null if it was declared by another version or is inconsistent.
extern "C" void* latent_tail_cuda_add_rank(const latent_tail_cuda_rank* declared) {
  if (declared->struct_size != sizeof(*declared)) return nullptr;
  Rank* rank = new Rank;
  rank->spec = {declared->tp,
                declared->latent_dim,
                declared->hidden_dim,
                declared->top_k,
                declared->max_tokens,
                declared->eps,
                declared->fp32_internal != 0,
                declared->gathers != 0,
                declared->has_residual != 0};
  rank->devices.assign(declared->devices, declared->devices + declared->num_devices);
  rank->kernels.assign(declared->kernels, declared->kernels + declared->num_kernels);
  rank->plans.assign(declared->plans, declared->plans + declared->max_tokens);
  for (const latent_tail_cuda_plan& plan : rank->plans) {
    if (plan.kernel >= rank->kernels.size() || plan.token_ctas < 1) {
      delete rank;
      return nullptr;
    }
  }
  rank->control = declared->control;
  auto* record = static_cast<const volatile uint32_t*>(declared->record);
  rank->failure_code = record + latent_tail::cuda::kRecordCode;
  rank->failed_ranks = record + latent_tail::cuda::kRecordRanks;
  rank->ordinal = declared->ordinal;
  rank->rank = declared->rank;
  rank->call_hash = declared->call_hash;
  rank->slots = declared->slots;
  rank->pdl = declared->pdl != 0;
  Rank* next = latent_tail::cuda::head.load(std::memory_order_relaxed);
  do {
    rank->next = next;
  } while (!latent_tail::cuda::head.compare_exchange_weak(next, rank, std::memory_order_release,
                                                          std::memory_order_relaxed));
  return rank;
}

// Later calls on this rank are refused, those of graphs that were captured earlier included.
extern "C" void latent_tail_cuda_close_rank(void* rank) {
  static_cast<Rank*>(rank)->closed.store(true, std::memory_order_relaxed);
}

// Opens the CUDA driver; null, or why it cannot (valid as long as the process).
extern "C" const char* latent_tail_cuda_open(const char* driver_path) {
  std::string error;
  if (latent_tail::cuda::OpenDriver(driver_path, &error)) return nullptr;
  return (new std::string(std::move(error)))->c_str();
}
