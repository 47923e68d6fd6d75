// Lets JAX's CPU client call the CUDA handlers: forwards a call frame with a
// stream that it has not, and stands in for the CUDA driver, whose launches it
// keeps.

#include <cstdint>
#include <cstring>

#include "xla/ffi/api/c_api.h"

namespace {

XLA_FFI_Handler *initialize = nullptr;
XLA_FFI_Handler *execute = nullptr;

XLA_FFI_Error *GetStream(XLA_FFI_Stream_Get_Args *args) {
  args->stream = reinterpret_cast<void *>(0x5712ea);
  return nullptr;
}

struct Attribute {
  int id;
  unsigned pad, value[16];
};

struct Config {
  unsigned grid[3], block[3], smem_bytes;
  void *stream;
  Attribute *attributes;
  unsigned num_attributes;
};

constexpr int kParameters = 17;
constexpr int kSizes[kParameters] = {8, 8, 8, 8, 8, 8, 8, 8, 4,
                                     4, 4, 4, 4, 4, 4, 4, 4};

struct Launch {
  uint64_t function, stream;
  uint32_t grid[3], block[3], smem_bytes, cluster[3], num_attributes, pdl;
  uint64_t parameters[kParameters];
};

Launch last;
uint64_t launches = 0;
int next_status = 0;

} // namespace

extern "C" {

void shim_forward_to(XLA_FFI_Handler *initialize_handler,
                     XLA_FFI_Handler *execute_handler) {
  initialize = initialize_handler;
  execute = execute_handler;
}

XLA_FFI_Error *shim_execute(XLA_FFI_CallFrame *frame) {
  // What XLA asks for at registration.
  if (frame->extension_start)
    return execute(frame);
  XLA_FFI_Api api = *frame->api;
  api.XLA_FFI_Stream_Get = GetStream;
  XLA_FFI_CallFrame forwarded = *frame;
  forwarded.api = &api;
  // On CUDA this stage comes first in every run; it has no buffers.
  forwarded.stage = XLA_FFI_ExecutionStage_INITIALIZE;
  forwarded.args.size = forwarded.rets.size = 0;
  if (XLA_FFI_Error *error = initialize(&forwarded))
    return error;
  forwarded.stage = XLA_FFI_ExecutionStage_EXECUTE;
  forwarded.args = frame->args;
  forwarded.rets = frame->rets;
  return execute(&forwarded);
}

int cuLaunchKernelEx(const Config *config, void *function, void **parameters,
                     void **extra) {
  if (next_status || extra)
    return next_status ? next_status : 1;
  ++launches;
  last = {};
  last.function = reinterpret_cast<uintptr_t>(function);
  last.stream = reinterpret_cast<uintptr_t>(config->stream);
  std::memcpy(last.grid, config->grid, sizeof(last.grid));
  std::memcpy(last.block, config->block, sizeof(last.block));
  last.smem_bytes = config->smem_bytes;
  last.num_attributes = config->num_attributes;
  for (unsigned i = 0; i < config->num_attributes; ++i) {
    const Attribute &attribute = config->attributes[i];
    if (attribute.id == 4)
      std::memcpy(last.cluster, attribute.value, sizeof(last.cluster));
    if (attribute.id == 6)
      last.pdl = attribute.value[0];
  }
  for (int i = 0; i < kParameters; ++i)
    std::memcpy(&last.parameters[i], parameters[i], kSizes[i]);
  return 0;
}

int cuGetErrorName(int, const char **name) {
  *name = "CUDA_ERROR_FOR_THE_TEST";
  return 0;
}

const Launch *shim_last() { return &last; }
uint64_t shim_launches() { return launches; }
void shim_set_status(int status) { next_status = status; }
}
