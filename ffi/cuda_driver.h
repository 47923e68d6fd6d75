// The little of the CUDA driver API that a launch needs, opened at run time: one library serves
// machines with and without a GPU, and building it needs no toolkit.

#ifndef JAX_LATENT_TAIL_CUDA_DRIVER_H_
#define JAX_LATENT_TAIL_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace latent_tail::cuda {

// Names and layout as in cuda.h, whose binary interface is stable.
using CUresult = int;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;

constexpr CUresult CUDA_SUCCESS = 0;
constexpr int CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4;
constexpr int CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6;

struct CUlaunchAttribute {
  int id;
  char pad[8 - sizeof(int)];
  union {
    char bytes[64];
    struct {
      unsigned int x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
  } value;
};
static_assert(sizeof(CUlaunchAttribute) == 72 && offsetof(CUlaunchAttribute, value) == 8);

struct CUlaunchConfig {
  unsigned int gridDimX, gridDimY, gridDimZ;
  unsigned int blockDimX, blockDimY, blockDimZ;
  unsigned int sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned int numAttrs;
};
static_assert(sizeof(CUlaunchConfig) == 56 && offsetof(CUlaunchConfig, hStream) == 32);

struct Driver {
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig*, CUfunction, void** parameters,
                               void** extra) = nullptr;
  CUresult (*cuGetErrorName)(CUresult, const char** name) = nullptr;

  std::string ErrorName(CUresult status) const;
};

// Opens the driver library, once per process. On failure returns null and sets `*error`.
const Driver* OpenDriver(const char* path, std::string* error);

// The driver that `OpenDriver` opened; null before. No lock is taken.
const Driver* GetDriver();

}  // namespace latent_tail::cuda

#endif  // JAX_LATENT_TAIL_CUDA_DRIVER_H_
