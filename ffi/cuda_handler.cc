// The XLA FFI handlers on CUDA. XLA calls `initialize` on every run of a program, replays of a
// captured graph included, and `execute` where it launches or captures: so the former looks for
// failures and the latter launches. What changes from call to call lives in device memory.

#include "call.h"
#include "cuda_driver.h"
#include "cuda_rank.h"

namespace latent_tail::cuda {
namespace {

ffi::ErrorOr<const Rank*> Find(const Attributes& attributes, int32_t ordinal) {
  if (const Rank* rank = FindRank(attributes, ordinal)) return rank;
  return ffi::Unexpected(ffi::Error(
      ffi::ErrorCode::kFailedPrecondition,
      "latent_tail: no communicator for " + attributes.ToString() + " on local device " +
          std::to_string(ordinal) +
          ". A program that was lowered elsewhere needs latent_tail.prepare with the same "
          "arguments in every process before its first run."));
}

ffi::Error Initialize(int32_t ordinal, ffi::RemainingArgs, ffi::RemainingRets,
                      ffi::Dictionary dictionary) {
  auto attributes = DecodeAttributes(dictionary);
  if (!attributes) return attributes.error();
  auto rank = Find(*attributes, ordinal);
  if (!rank) return rank.error();
  return CheckUsable(**rank, *attributes);
}

ffi::Error Execute(CUstream stream, int32_t ordinal, ffi::RemainingArgs arguments,
                   ffi::RemainingRets results, ffi::Dictionary dictionary) {
  auto attributes = DecodeAttributes(dictionary);
  if (!attributes) return attributes.error();
  auto buffers = DecodeBuffers(attributes->spec, arguments, results);
  if (!buffers) return buffers.error();
  if (buffers->tokens > attributes->spec.max_tokens) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "latent_tail: " + std::to_string(buffers->tokens) +
                          " tokens; allowed: up to max_tokens. " + attributes->ToString());
  }
  auto rank = Find(*attributes, ordinal);
  if (!rank) return rank.error();
  const Driver* driver = GetDriver();
  if (!driver) {
    return ffi::Error(ffi::ErrorCode::kInternal, "latent_tail: the CUDA driver was not opened");
  }
  return Launch(*driver, **rank, *buffers, stream);
}

auto BindInitialize() {
  return ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

auto BindExecute() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<CUstream>>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(latent_tail_cuda_initialize, Initialize, BindInitialize());

XLA_FFI_DEFINE_HANDLER_SYMBOL(latent_tail_cuda_execute, Execute, BindExecute(),
                              {ffi::Traits::kCmdBufferCompatible});

// The same without the trait: XLA launches it each time instead of capturing it.
XLA_FFI_DEFINE_HANDLER_SYMBOL(latent_tail_cuda_execute_uncaptured, Execute, BindExecute());

}  // namespace latent_tail::cuda
