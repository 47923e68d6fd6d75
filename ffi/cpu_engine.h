// Meets, reduces and completes the calls of ranks on CPU devices, in one process or several.
//
// Nothing here knows XLA's handlers: a rank arrives with its buffers and a function to be called
// when the results are in them. Arriving never waits for another rank. The calls of one launch may
// come in any order and on any threads, and a rank's program may go on inside its function, so
// functions of two ranks are never called one after the other by a thread that others depend on.

#ifndef JAX_LATENT_TAIL_CPU_ENGINE_H_
#define JAX_LATENT_TAIL_CPU_ENGINE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "call.h"
#include "cpu_segment.h"

namespace latent_tail::cpu {

struct Failure {
  enum Code : uint32_t { kTimeout = 1, kDisagreement = 2, kClosed = 3, kForked = 4, kInvalid = 5 };

  Code code;
  std::string message;
};

// Called once, with null when the results are in place, and never before that with buffers still in
// use.
using Done = std::function<void(const Failure*)>;

// Who takes part; equal in all processes but for `process`.
struct Configuration {
  Spec spec;
  std::vector<int64_t> devices;    // global ids, row-major [groups, tp]
  std::vector<int32_t> processes;  // the process of each, numbered from 0
  int32_t process = 0;             // this one
  double deadline_s = 0;           // how long a rank waits for its peers
};

class Group;

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // Bytes of shared memory that the processes need; 0 where no group spans two of them.
  static int64_t SegmentBytes(const Configuration& configuration);

  // `segment` is that many zero-filled bytes mapped by all processes, or null. The communicator
  // unmaps it, if `owns_segment`, when the last call is through after Close. On a fault returns
  // null and leaves the mapping alone.
  static std::shared_ptr<Communicator> Create(Configuration configuration, void* segment,
                                              bool owns_segment, std::string* fault);
  ~Communicator();

  const Configuration& configuration() const { return configuration_; }
  bool spans_processes() const { return segment_ != nullptr; }

  // The position in the table of a device of this process, or -1.
  int64_t PositionOf(int64_t device) const;

  // The number of a launch, counted from the first that this communicator saw of its executable.
  // XLA's own id counts in each process by itself: a process that was left out of a launch, or had
  // several in its queue when they failed, is out of step for good. Since all made the
  // communicator, they are in step.
  int64_t LaunchOf(uint64_t executable, int64_t run);

  // The rank at `position` comes to a call. The buffers must stay valid until `done` is called,
  // which may be before this returns.
  void Arrive(int64_t position, const CallKey& key, const Buffers& buffers, Done done);

  // Why every further call fails, once there is a reason.
  std::optional<Failure> failure() const;

  // Fails what is pending here, at once, and at the peers what still waits for this process.
  void Close();

  // Ends what has waited too long; called by the watchdog.
  void CheckDeadlines(std::chrono::steady_clock::time_point now);

 private:
  friend class Group;

  Communicator(Configuration configuration, void* segment, bool owns_segment);
  SegmentHeader* header() const { return static_cast<SegmentHeader*>(segment_); }
  Bell& bell(int32_t process) const;
  void Ring(int32_t process) const;
  // Fails all calls of this process, pending and to come; peers are told unless one of them told
  // us. No group's lock may be held.
  void Break(Failure failure, bool tell_peers);
  void AdoptBreak();
  bool broken() const { return broken_.load(std::memory_order_acquire); }
  // A listener sleeps on this process's bell and does what peers' calls make possible.
  void StartListener();
  void Listen();

  const Configuration configuration_;
  void* const segment_;
  const bool owns_segment_;
  const int64_t segment_bytes_;
  int32_t num_processes_ = 1;
  int spins_ = 0;
  std::vector<std::unique_ptr<Group>> groups_;
  std::atomic<int> listeners_{0};  // not counting those inside a rank's function
  std::atomic<bool> broken_{false};
  std::atomic<bool> closed_{false};
  std::mutex launches_mutex_;
  std::unordered_map<uint64_t, int64_t> first_runs_;  // of each executable
  mutable std::mutex failure_mutex_;
  std::optional<Failure> failure_;
};

// Whether this process is a forked child of the one that loaded the library: it has none of the
// threads, and must touch nothing.
bool IsForkedChild();

}  // namespace latent_tail::cpu

#endif  // JAX_LATENT_TAIL_CPU_ENGINE_H_
