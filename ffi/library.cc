// What the library says about itself.

#include "xla/ffi/api/c_api.h"

// The C interface and the targets' attributes; `native.py` refuses any other.
extern "C" int latent_tail_interface_version() { return 3; }

extern "C" int latent_tail_xla_ffi_version() {
  return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR;
}
