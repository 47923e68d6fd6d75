// One FFI call of the tail, decoded and checked: what every platform's handler starts from.

#ifndef JAX_LATENT_TAIL_CALL_H_
#define JAX_LATENT_TAIL_CALL_H_

#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace latent_tail {

namespace ffi = ::xla::ffi;

// The static description of a call, equal on every rank; `spec.py` explains the fields. Dimensions
// of a half that the call does not have are 0, as is top_k where the routed rows come finalized.
struct Spec {
  int64_t tp = 0;
  int64_t latent_dim = 0;
  int64_t hidden_dim = 0;
  int64_t top_k = 0;
  int64_t max_tokens = 0;
  float eps = 0;
  bool fp32_internal = false;
  bool gathers = false;       // all_gather_add of rows of shard_dim columns each, which with a
                              // latent_dim are computed first
  bool has_residual = false;  // which adds one

  int64_t shard_dim() const { return hidden_dim / tp; }
  // Whether the call computes by the up-projection what it gathers.
  bool projects() const { return gathers && latent_dim > 0; }
  bool operator==(const Spec& other) const {
    return tp == other.tp && latent_dim == other.latent_dim && hidden_dim == other.hidden_dim &&
           top_k == other.top_k && max_tokens == other.max_tokens && eps == other.eps &&
           fp32_internal == other.fp32_internal && gathers == other.gathers &&
           has_residual == other.has_residual;
  }
};

// What a call's attributes say: its description, and who its ranks are. `devices` holds global
// device ids, row-major [groups, tp]; it views the attribute.
struct Attributes {
  Spec spec;
  ffi::Span<const int64_t> devices;

  std::string ToString() const;
};

// Buffers of a checked call; bf16 words as uint16_t. Null where the call has no such operand.
struct Buffers {
  int64_t tokens = 0;                   // M
  int64_t permuted_rows = 0;            // P, where the call finalizes
  const uint16_t* rows = nullptr;       // [M, L] or [P, L]
  const uint16_t* weights = nullptr;    // [M, K]
  const int32_t* indices = nullptr;     // [M, K]
  const uint16_t* gamma = nullptr;      // [L]
  const uint16_t* shared = nullptr;     // [M, H]
  uint16_t* latent = nullptr;           // [M, L]
  uint16_t* shard = nullptr;            // [M, S]
  const uint16_t* projected = nullptr;  // of a gather with a latent_dim: [M, L]
  const uint16_t* w_up = nullptr;       // [L, S]
  const uint16_t* x = nullptr;          // of any gather: [M, S]
  const uint16_t* residual = nullptr;   // [M, H]
  uint16_t* gathered = nullptr;         // [M, H]
};

ffi::ErrorOr<Attributes> DecodeAttributes(ffi::Dictionary attributes);

// Checks number, dtype and dimensions of every buffer against the description; XLA checks none.
ffi::ErrorOr<Buffers> DecodeBuffers(const Spec& spec, ffi::RemainingArgs arguments,
                                    ffi::RemainingRets results);

}  // namespace latent_tail

#endif  // JAX_LATENT_TAIL_CALL_H_
