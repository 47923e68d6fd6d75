// Which call of which executable a rank has come to, in terms that other processes share.
//
// XLA makes one state per call of an executable, used by all local devices, and tells nobody which
// states belong together or what they stand for in another process. The attributes do not say
// either: calls whose lowering JAX cached, or that stem from one inlined function, have the same.
// But the states of an executable are made one after the other, on one thread and in an order that
// depends on the program alone. So a call is named by its position in that series, and the
// executable by what the whole series consists of. Where the series was delimited wrongly, which
// takes two compilations of one module without a lowering or a run in between, names differ and the
// call ends with an error.

#ifndef JAX_LATENT_TAIL_CPU_SITE_H_
#define JAX_LATENT_TAIL_CPU_SITE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "call.h"
#include "cpu_segment.h"

namespace latent_tail::cpu {

// The calls of one executable, while and after they are made.
class Series {
 public:
  // `lowering` counts the times that the module, or one that looks the same, was lowered.
  Series(int64_t module, uint64_t lowering);

  bool IsOf(int64_t module, uint64_t lowering) const {
    return module == module_ && lowering == lowering_;
  }
  // Adds a call of this content; returns its position, or -1 once the series has been named.
  int64_t Add(uint64_t content);
  // Unique in this process.
  uint64_t number() const { return number_; }
  // The id of the first launch, given that of a launch. It is equal in all processes, and differs
  // from that of another executable: XLA's id is a fingerprint plus the launches of this process.
  int64_t FirstRun(int64_t run);
  // Its name; nothing can be added afterwards.
  uint64_t Name();

 private:
  const uint64_t number_;
  const int64_t module_;
  const uint64_t lowering_;
  std::mutex mutex_;
  std::optional<int64_t> first_run_;
  uint64_t hash_;
  int64_t size_ = 0;
  bool is_named_ = false;
};

// XLA's state of one call.
class CallSite {
 public:
  static ffi::TypeId id;

  // On the thread that compiles. `module` is equal for the calls of one module, and hardly ever for
  // those of two.
  CallSite(int64_t module, const Attributes& attributes);

  // Which executable of this process it is part of.
  uint64_t executable() const { return series_->number(); }
  int64_t FirstRun(int64_t run) { return series_->FirstRun(run); }

  // The call that the rank at `position` of the device table makes now. Names of one process serve
  // where all ranks are in it: they cannot be mistaken.
  CallKey Visit(int64_t position, int64_t run, bool across_processes);

  // `module` is being lowered: calls of that name made from now on are another executable's. To be
  // called on any thread, for XLA may compile on one of its own.
  static void EndSeries(int64_t module);

 private:
  struct Visits {
    int64_t run = 0;
    uint64_t count = 0;  // in this run
  };

  const uint64_t number_;  // unique in this process
  std::shared_ptr<Series> series_;
  int64_t index_ = 0;
  std::mutex mutex_;
  std::vector<Visits> visits_;  // of each position
};

}  // namespace latent_tail::cpu

#endif  // JAX_LATENT_TAIL_CPU_SITE_H_
