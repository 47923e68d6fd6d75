#include "cuda_driver.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

namespace latent_tail::cuda {
namespace {

std::atomic<const Driver*> opened{nullptr};

template <typename Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

std::string Driver::ErrorName(CUresult status) const {
  const char* name = nullptr;
  if (cuGetErrorName(status, &name) == CUDA_SUCCESS && name) return name;
  return "CUDA error " + std::to_string(status);
}

const Driver* OpenDriver(const char* path, std::string* error) {
  static std::mutex& mutex = *new std::mutex;  // never destroyed: exit may overtake a caller
  std::lock_guard<std::mutex> lock(mutex);
  if (const Driver* driver = opened.load(std::memory_order_acquire)) return driver;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    *error = dlerror();
    return nullptr;
  }
  Driver driver;
  if (!Find(library, "cuLaunchKernelEx", driver.cuLaunchKernelEx) ||
      !Find(library, "cuGetErrorName", driver.cuGetErrorName)) {
    *error = std::string(path) + " is older than CUDA 11.8: it has no cuLaunchKernelEx";
    dlclose(library);
    return nullptr;
  }
  const Driver* result = new Driver(driver);
  opened.store(result, std::memory_order_release);
  return result;
}

const Driver* GetDriver() { return opened.load(std::memory_order_acquire); }

}  // namespace latent_tail::cuda
