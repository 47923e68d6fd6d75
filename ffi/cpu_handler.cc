// The XLA FFI handlers on CPUs. XLA instantiates a call once for each executable, and executes it
// on any thread for each device, several calls of one device at a time. What a call returns is a
// future: a handler that waited for other ranks would hold a thread that these may need.

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "call.h"
#include "cpu_engine.h"
#include "cpu_site.h"

// C interface for `native.py`, which declares the same struct. `struct_size` is sizeof, so that a
// library and a package of different versions refuse each other. Everything is copied.
extern "C" {

struct latent_tail_cpu_communicator {
  uint64_t struct_size;
  const int64_t* devices;    // global device ids, row-major [groups, tp]
  const int32_t* processes;  // the process of each device, numbered from 0 without gaps
  uint64_t num_devices;
  int64_t tp, latent_dim, hidden_dim, top_k, max_tokens;
  double deadline_s;
  float eps;
  uint32_t fp32_internal;
  int32_t process;     // this one
  int32_t segment_fd;  // shared memory of latent_tail_cpu_segment_bytes zeros, or -1; stays open
  uint32_t gathers, has_residual;
};

}  // extern "C"

namespace latent_tail::cpu {
namespace {

// The open communicators of this process. Never destroyed: handlers may run until it ends.
class Registry {
 public:
  static Registry& Get() {
    static Registry* registry = new Registry;
    return *registry;
  }

  void Add(std::shared_ptr<Communicator> communicator) {
    std::lock_guard<std::mutex> lock(mutex_);
    communicators_.push_back(std::move(communicator));
  }

  void Remove(const std::shared_ptr<Communicator>& communicator) {
    std::lock_guard<std::mutex> lock(mutex_);
    communicators_.erase(std::remove(communicators_.begin(), communicators_.end(), communicator),
                         communicators_.end());
  }

  // The latest of that description.
  std::shared_ptr<Communicator> Find(const Attributes& attributes) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = communicators_.rbegin(); it != communicators_.rend(); ++it) {
      const Configuration& configuration = (*it)->configuration();
      if (configuration.spec == attributes.spec &&
          std::equal(configuration.devices.begin(), configuration.devices.end(),
                     attributes.devices.begin(), attributes.devices.end())) {
        return *it;
      }
    }
    return nullptr;
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<Communicator>> communicators_;
};

ffi::Error ToError(const Failure& failure) {
  ffi::ErrorCode code = ffi::ErrorCode::kFailedPrecondition;
  if (failure.code == Failure::kTimeout) code = ffi::ErrorCode::kDeadlineExceeded;
  if (failure.code == Failure::kInvalid) code = ffi::ErrorCode::kInvalidArgument;
  return ffi::Error(code, "latent_tail: " + failure.message);
}

constexpr char kNoProjection[] = "on CPUs there is no call that computes an up-projection";

ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(ffi::Dictionary dictionary) {
  auto attributes = DecodeAttributes(dictionary);
  if (!attributes) return ffi::Unexpected(attributes.error());
  if (attributes->spec.projects()) {
    return ffi::Unexpected(ToError({Failure::kInvalid, kNoProjection}));
  }
  auto module = dictionary.get<int64_t>("module");
  if (!module) return ffi::Unexpected(module.error());
  return std::make_unique<CallSite>(*module, *attributes);
}

ffi::Error Arrive(CallSite* site, int64_t run, int32_t device, ffi::RemainingArgs arguments,
                  ffi::RemainingRets results, ffi::Dictionary dictionary,
                  const ffi::Promise& promise) {
  auto attributes = DecodeAttributes(dictionary);
  if (!attributes) return attributes.error();
  auto buffers = DecodeBuffers(attributes->spec, arguments, results);
  if (!buffers) return buffers.error();
  if (IsForkedChild()) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      "latent_tail: the process was forked from one that uses JAX");
  }
  std::shared_ptr<Communicator> communicator = Registry::Get().Find(*attributes);
  int64_t position = communicator ? communicator->PositionOf(device) : -1;
  if (position < 0) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      "latent_tail: no communicator for " + attributes->ToString() + " on device " +
                          std::to_string(device) +
                          ". A program that was compiled elsewhere, or before latent_tail.close, "
                          "needs latent_tail.prepare with the same arguments in every process "
                          "before it runs.");
  }
  CallKey key = site->Visit(position, run, communicator->spans_processes());
  if (communicator->spans_processes()) {
    key.run = site->FirstRun(run) + communicator->LaunchOf(site->executable(), run);
  }
  communicator->Arrive(position, key, *buffers,
                       [promise = promise](const Failure* failure) mutable {
                         if (failure) {
                           promise.SetError(ToError(*failure));
                         } else {
                           promise.SetAvailable();
                         }
                       });
  return ffi::Error::Success();
}

ffi::Future Execute(CallSite* site, ffi::RunId run, int32_t device, ffi::RemainingArgs arguments,
                    ffi::RemainingRets results, ffi::Dictionary dictionary) {
  ffi::Promise promise;
  ffi::Future future(promise);
  ffi::Error error = Arrive(site, run.run_id, device, arguments, results, dictionary, promise);
  if (!error.success()) promise.SetError(std::move(error));
  return future;
}

Configuration Decode(const latent_tail_cpu_communicator& declared) {
  Configuration configuration;
  configuration.spec = {declared.tp,
                        declared.latent_dim,
                        declared.hidden_dim,
                        declared.top_k,
                        declared.max_tokens,
                        declared.eps,
                        declared.fp32_internal != 0,
                        declared.gathers != 0,
                        declared.has_residual != 0};
  configuration.devices.assign(declared.devices, declared.devices + declared.num_devices);
  configuration.processes.assign(declared.processes, declared.processes + declared.num_devices);
  configuration.process = declared.process;
  configuration.deadline_s = declared.deadline_s;
  return configuration;
}

void* Map(int fd, int64_t bytes, std::string* fault) {
  struct stat status;
  if (fstat(fd, &status) != 0 || status.st_size != bytes) {
    *fault = "the shared segment has " + std::to_string(status.st_size) + " bytes instead of " +
             std::to_string(bytes);
    return nullptr;
  }
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    *fault = std::string("cannot map the shared segment: ") + std::strerror(errno);
    return nullptr;
  }
  return memory;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(latent_tail_cpu_instantiate, Instantiate,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kInstantiate>().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(latent_tail_cpu_execute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CallSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

}  // namespace latent_tail::cpu

using latent_tail::cpu::CallSite;
using latent_tail::cpu::Communicator;

// What JAX registers the state's type with; XLA writes the id.
extern "C" XLA_FFI_TypeId* latent_tail_cpu_state_id() { return &CallSite::id; }

extern "C" const XLA_FFI_TypeInfo* latent_tail_cpu_state_info() {
  static const XLA_FFI_TypeInfo info = latent_tail::ffi::MakeTypeInfo<CallSite>();
  return &info;
}

// A module with this digest is being lowered: what is compiled next is not what was compiled last.
extern "C" void latent_tail_cpu_end_series(int64_t module) { CallSite::EndSeries(module); }

// Bytes of the shared segment that the processes need, 0 if none; -1 for a foreign struct.
extern "C" int64_t latent_tail_cpu_segment_bytes(const latent_tail_cpu_communicator* declared) {
  if (declared->struct_size != sizeof(*declared)) return -1;
  return Communicator::SegmentBytes(latent_tail::cpu::Decode(*declared));
}

// Makes a communicator that calls of its description find; null if it cannot, with the reason in
// `fault`.
extern "C" void* latent_tail_cpu_open(const latent_tail_cpu_communicator* declared, char* fault,
                                      uint64_t fault_size) {
  std::string reason = "the library and native.py disagree on latent_tail_cpu_communicator";
  std::shared_ptr<Communicator> communicator;
  if (declared->struct_size == sizeof(*declared)) {
    auto configuration = latent_tail::cpu::Decode(*declared);
    if (configuration.spec.projects()) {
      std::snprintf(fault, fault_size, "%s", latent_tail::cpu::kNoProjection);
      return nullptr;
    }
    int64_t bytes = Communicator::SegmentBytes(configuration);
    void* segment = nullptr;
    bool is_mapped = true;
    if (bytes > 0) {
      segment = latent_tail::cpu::Map(declared->segment_fd, bytes, &reason);
      is_mapped = segment != nullptr;
    }
    if (is_mapped) communicator = Communicator::Create(configuration, segment, true, &reason);
    if (segment && !communicator) munmap(segment, bytes);
  }
  if (!communicator) {
    std::snprintf(fault, fault_size, "%s", reason.c_str());
    return nullptr;
  }
  latent_tail::cpu::Registry::Get().Add(communicator);
  return new std::shared_ptr<Communicator>(std::move(communicator));
}

// Copies why the communicator's calls fail; returns 0 if they do not.
extern "C" int latent_tail_cpu_failure(void* handle, char* text, uint64_t text_size) {
  if (latent_tail::cpu::IsForkedChild()) return 0;
  auto failure = (*static_cast<std::shared_ptr<Communicator>*>(handle))->failure();
  if (!failure) return 0;
  std::snprintf(text, text_size, "%s", failure->message.c_str());
  return 1;
}

// Fails what is pending and all that comes; the handle is gone. Memory goes with the last call.
extern "C" void latent_tail_cpu_close(void* handle) {
  if (latent_tail::cpu::IsForkedChild()) return;
  auto* communicator = static_cast<std::shared_ptr<Communicator>*>(handle);
  latent_tail::cpu::Registry::Get().Remove(*communicator);
  (*communicator)->Close();
  delete communicator;
}
