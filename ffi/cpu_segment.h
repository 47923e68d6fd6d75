// The memory that the processes of a communicator share, and who may write which part of it.
//
// Each rank has a *lane*: a log of its calls and an arena for their data. Only the rank's own
// process appends to the log and allocates from the arena; the others read an entry after its stamp
// says so, and count themselves in `consumed` when they are through with it, after which the owner
// may reuse it. The rows of the all-reduce are worked off by all processes together, through two
// counters in the entry of rank 0. So no lock is shared, and a process that dies holds none.
//
// Fresh memory is all zero, which is a valid empty segment.

#ifndef JAX_LATENT_TAIL_CPU_SEGMENT_H_
#define JAX_LATENT_TAIL_CPU_SEGMENT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace latent_tail::cpu {

// What one rank's call has in common with those of its peers, and with no other call.
struct CallKey {
  int64_t run = 0;       // XLA's id of the launch, equal in all processes
  uint64_t program = 0;  // the executable, by what it consists of
  uint64_t site = 0;     // which call of that executable
  uint64_t count = 0;    // how often this rank has come there in this run

  bool operator==(const CallKey& other) const {
    return run == other.run && program == other.program && site == other.site &&
           count == other.count;
  }
};

struct alignas(64) Entry {
  enum State : uint64_t { kNone = 0, kAnnounced = 1, kReady = 2 };

  // 4 * (number of the call in this lane + 1) + state; what follows is valid from kAnnounced on,
  // the data in the arena from kReady on.
  std::atomic<uint64_t> stamp;
  CallKey key;
  int64_t tokens;
  uint64_t offset;                // of the data in the lane's arena, in bytes
  std::atomic<uint32_t> consumed;  // processes that need this entry no more
  // In rank 0's entry: rows of the all-reduce that somebody has begun and that are done, and
  // whether a process sleeps until all are.
  std::atomic<uint32_t> rows_begun;
  std::atomic<uint32_t> rows_done;
  std::atomic<uint32_t> rows_awaited;

  static uint64_t Stamp(uint64_t number, State state) { return 4 * (number + 1) + state; }
};

struct alignas(64) Bell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> spinning;  // threads that will see `rings` change without being woken
  std::atomic<uint32_t> sleeping;
  std::atomic<uint32_t> left;  // the process has closed its communicator
};

struct alignas(64) GroupWords {
  std::atomic<uint32_t> parked;  // calls of any rank that wait for room in its arena
};

struct alignas(64) SegmentHeader {
  enum Broken : uint32_t { kSound = 0, kWriting = 1, kBroken = 2 };

  std::atomic<uint64_t> configuration;  // hash of what all must agree on; set by whoever is first
  std::atomic<uint32_t> num_left;       // processes that have closed their communicator
  std::atomic<uint32_t> broken;
  uint32_t code;
  char reason[2048];
};

// Calls of one rank whose outcome is open at the same time; more wait for the oldest.
constexpr uint64_t kLogEntries = 1024;

}  // namespace latent_tail::cpu

#endif  // JAX_LATENT_TAIL_CPU_SEGMENT_H_
