#include "cpu_engine.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>

#include "cpu_pool.h"
#include "cpu_reduce.h"
#include "cpu_wait.h"

namespace latent_tail::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// Elements to add from which a second thread shortens a call: some 10 us of work.
constexpr int64_t kElementsWorthSharing = 1 << 17;

constexpr uint64_t kAlignment = 64;

uint64_t Align(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::atomic<bool> is_forked_child{false};

// Columns of the rows that a rank has for all others alike: its contribution or, where they are
// gathered, its columns.
int64_t CommonColumns(const Spec& spec) {
  return spec.gathers ? spec.shard_dim() : spec.latent_dim;
}

// Columns of the slices of which each rank gets its own.
int64_t SliceColumns(const Spec& spec) { return spec.gathers ? 0 : spec.shard_dim(); }

// What a rank's data in its arena consists of, in order: its common rows; for rank 0 the normalised
// rows [M, L] that all processes write; its slices [M, S] of the shared rows for each rank of
// another process, ascending. Offsets in bytes.
struct Slab {
  uint64_t latent = 0;
  uint64_t slices = 0;
  uint64_t slice_bytes = 0;
  uint64_t bytes = 0;

  Slab(const Spec& spec, int64_t tokens, bool is_first_rank, int64_t num_remote) {
    latent = Align(tokens * CommonColumns(spec) * sizeof(uint16_t));
    slices = latent + (is_first_rank ? Align(tokens * spec.latent_dim * sizeof(uint16_t)) : 0);
    slice_bytes = Align(tokens * SliceColumns(spec) * sizeof(uint16_t));
    bytes = slices + num_remote * slice_bytes;
  }
};

std::string List(const std::vector<std::string>& items) {
  std::string text;
  for (size_t i = 0; i < items.size(); ++i) text += (i ? ", " : "") + items[i];
  return text;
}

std::string Describe(const CallKey& key, int64_t tokens) {
  char text[160];
  std::snprintf(text, sizeof(text),
                "call %llu of site %llu in launch %lld of program %08llx with "
                "%lld tokens",
                static_cast<unsigned long long>(key.count),
                static_cast<unsigned long long>(key.site), static_cast<long long>(key.run),
                static_cast<unsigned long long>(key.program & 0xFFFFFFFF),
                static_cast<long long>(tokens));
  return text;
}

}  // namespace

bool IsForkedChild() { return is_forked_child.load(std::memory_order_relaxed); }

// The ranks that meet each other, as seen from this process.
class Group {
 public:
  Group(Communicator* owner, int64_t first_position, char* memory);
  ~Group();

  // Bytes of shared memory; 0 if all ranks are of one process.
  static uint64_t Bytes(const Configuration& configuration, int64_t first_position);

  void Arrive(int64_t rank, const CallKey& key, const Buffers& buffers, Done done);
  // Does what has become possible without a local arrival; each completion is added to
  // `completions`, to be run on a thread of its own. False if there was nothing to do.
  bool Progress(std::vector<Pool::Job>* completions);
  // Fails every call that nobody is in the middle of; who is must call this again.
  void FailPending(const Failure& failure);
  // What waited too long at `now`, if anything did.
  std::optional<Failure> Overdue(Clock::time_point now);
  bool spans_processes() const { return words_ != nullptr; }

 private:
  // A local rank's part of a call. While it is filling, somebody reads its buffers.
  struct Arrival {
    enum State { kAbsent, kParked, kFilling, kWaiting };
    State state = kAbsent;
    Buffers buffers;
    Done done;
    std::vector<uint16_t> contribution;  // [M, L] where the call finalizes within one process
  };

  // One rank's part of a call, wherever it is. The number is that of the entry in its lane.
  struct Source {
    bool announced = false;
    bool ready = false;
    int64_t tokens = 0;
    Entry* entry = nullptr;
    uint64_t number = 0;
    const uint16_t* rows = nullptr;  // the common ones
  };

  struct Call {
    enum State { kPending, kRunning, kAwaitingRows };
    CallKey key;
    State state = kPending;
    bool disputed = false;  // never to be run
    int64_t tokens = 0;
    int num_local = 0;              // arrived
    int num_local_ready = 0;        // and with their data where peers can read it
    Clock::time_point since;        // arrival of the first local rank
    std::vector<Arrival> arrivals;  // of local ranks, in order
    std::vector<Source> sources;    // of all ranks
    // Work on the call once all have come. Threads that help hold a reference each.
    int64_t num_tasks = 0;
    std::atomic<int64_t> tasks_begun{0};
    std::atomic<int64_t> tasks_done{0};
    std::atomic<int> copies_left{0};
    std::atomic<int> references{0};
    std::shared_ptr<Communicator> owner;  // keeps the memory while there is a local arrival
  };

  // A log and an arena of a rank. `next` is, for a rank of this process, the number of its next
  // call, else that of the next one to be read.
  struct Lane {
    Entry* log = nullptr;
    char* arena = nullptr;
    uint64_t next = 0;
    // Of local ranks alone:
    struct Block {
      uint64_t offset, bytes;
      Entry* entry;
      bool is_reserve;
    };
    std::vector<Block> blocks;  // in use, ascending; the reserve's, if any, last
    std::deque<Call*> unannounced;
    std::deque<Call*> parked;
  };

  int64_t tp() const { return spec_.tp; }
  const Spec& spec_;
  int32_t ProcessOf(int64_t rank) const {
    return owner_->configuration_.processes[first_position_ + rank];
  }
  std::string Name(int64_t rank) const;
  Entry& EntryOf(Lane& lane, uint64_t number) { return lane.log[number % kLogEntries]; }

  // The following need the lock.
  Call* FindOrAdd(const CallKey& key);
  void Remove(Call* call);
  void Recycle(Call* call);
  // Notes that `rank` takes part with so many tokens; a failure if others disagree.
  std::optional<Failure> Admit(Call* call, int64_t rank, int64_t tokens);
  std::optional<Failure> ReadLogs();
  std::optional<Failure> Abandoned();
  bool AllReady(Call* call);
  void Reclaim(Lane& lane);
  bool Announce(Lane& lane, Call* call, int64_t rank);
  bool Allocate(Lane& lane, Call* call, int64_t rank);
  bool MayUseReserve(Call* call);
  bool Unpark(std::vector<std::pair<Call*, int64_t>>* to_fill);

  // These must be called without it.
  void Fill(Call* call, int64_t rank);
  void RingPeers(bool and_self) const;
  void Run(Call* call, int64_t arriving_rank, std::vector<Pool::Job>* completions);
  bool Work(Call* call);
  void DoToken(Call* call, int64_t token);
  void DoRow(Call* call, int64_t token);
  void DoShard(Call* call, int64_t local);
  void DoGather(Call* call, int64_t local);
  bool RowsDone(Call* call) const;
  bool AwaitRows(Call* call);
  void Finish(Call* call, std::vector<Pool::Job>* completions);
  void Complete(Call* call, size_t local);
  void Drop(Call* call);

  Communicator* const owner_;
  const int64_t first_position_;
  std::vector<int64_t> local_ranks_;
  std::vector<int64_t> local_index_;  // of each rank among them, or -1
  std::vector<int32_t> peers_;        // other processes of the group
  uint32_t num_processes_ = 1;
  GroupWords* words_ = nullptr;                    // null if the group is within this process
  std::vector<std::vector<int64_t>> slice_index_;  // [rank][destination] in its slab, or -1
  std::vector<int64_t> num_remote_;                // [rank] ranks of other processes
  std::vector<uint64_t> arena_bytes_;              // [rank] without the reserve

  mutable std::mutex mutex_;
  std::vector<Lane> lanes_;
  std::vector<Call*> calls_;  // open ones
  std::vector<Call*> spare_;
  uint64_t oldest_of_first_rank_ = 0;  // number of rank 0's oldest call that is not consumed
};

// ---------------------------------------------------------------------------------------------
// Layout

uint64_t Group::Bytes(const Configuration& configuration, int64_t first_position) {
  const Spec& spec = configuration.spec;
  const int32_t* processes = configuration.processes.data() + first_position;
  if (std::count(processes, processes + spec.tp, processes[0]) == spec.tp) return 0;
  uint64_t bytes = Align(sizeof(GroupWords));
  for (int64_t rank = 0; rank < spec.tp; ++rank) {
    int64_t num_remote = spec.tp - std::count(processes, processes + spec.tp, processes[rank]);
    // Two of the largest calls, so that one can be filled while peers read the other; and the
    // reserve, one more.
    bytes += Align(kLogEntries * sizeof(Entry)) +
             3 * Slab(spec, spec.max_tokens, rank == 0, num_remote).bytes;
  }
  return bytes;
}

Group::Group(Communicator* owner, int64_t first_position, char* memory)
    : spec_(owner->configuration_.spec), owner_(owner), first_position_(first_position) {
  const Configuration& configuration = owner->configuration_;
  lanes_.resize(tp());
  local_index_.assign(tp(), -1);
  slice_index_.assign(tp(), std::vector<int64_t>(tp(), -1));
  num_remote_.assign(tp(), 0);
  for (int64_t rank = 0; rank < tp(); ++rank) {
    if (ProcessOf(rank) == configuration.process) {
      local_index_[rank] = static_cast<int64_t>(local_ranks_.size());
      local_ranks_.push_back(rank);
    } else if (std::find(peers_.begin(), peers_.end(), ProcessOf(rank)) == peers_.end()) {
      peers_.push_back(ProcessOf(rank));
    }
    for (int64_t destination = 0; destination < tp(); ++destination) {
      if (ProcessOf(destination) == ProcessOf(rank)) continue;
      slice_index_[rank][destination] = num_remote_[rank]++;
    }
  }
  num_processes_ = static_cast<uint32_t>(peers_.size()) + 1;
  if (memory == nullptr || local_ranks_.empty()) return;
  words_ = reinterpret_cast<GroupWords*>(memory);
  memory += Align(sizeof(GroupWords));
  for (int64_t rank = 0; rank < tp(); ++rank) {
    lanes_[rank].log = reinterpret_cast<Entry*>(memory);
    lanes_[rank].arena = memory + Align(kLogEntries * sizeof(Entry));
    uint64_t slab = Slab(spec_, spec_.max_tokens, rank == 0, num_remote_[rank]).bytes;
    arena_bytes_.push_back(2 * slab);
    memory = lanes_[rank].arena + 3 * slab;
  }
}

Group::~Group() {
  for (Call* call : calls_) delete call;
  for (Call* call : spare_) delete call;
}

std::string Group::Name(int64_t rank) const {
  return std::to_string(rank) + " (device " +
         std::to_string(owner_->configuration_.devices[first_position_ + rank]) +
         (words_ ? ", process " + std::to_string(ProcessOf(rank)) : "") + ")";
}

// ---------------------------------------------------------------------------------------------
// Who has come to which call

Group::Call* Group::FindOrAdd(const CallKey& key) {
  for (Call* call : calls_) {
    if (call->state == Call::kPending && call->key == key) return call;
  }
  Call* call;
  if (spare_.empty()) {
    call = new Call;
    call->arrivals.resize(local_ranks_.size());
  } else {
    call = spare_.back();
    spare_.pop_back();
  }
  call->key = key;
  call->state = Call::kPending;
  call->disputed = false;
  call->tokens = 0;
  call->num_local = call->num_local_ready = 0;
  call->sources.assign(tp(), Source());
  calls_.push_back(call);
  return call;
}

void Group::Remove(Call* call) {
  auto found = std::find(calls_.begin(), calls_.end(), call);
  if (found == calls_.end()) return;
  *found = calls_.back();
  calls_.pop_back();
}

void Group::Recycle(Call* call) {
  for (Arrival& arrival : call->arrivals) arrival.state = Arrival::kAbsent;
  spare_.push_back(call);
}

std::optional<Failure> Group::Admit(Call* call, int64_t rank, int64_t tokens) {
  Source& source = call->sources[rank];
  if (source.announced) {
    call->disputed = true;
    return Failure{Failure::kDisagreement,
                   "rank " + Name(rank) + " came twice to " + Describe(call->key, tokens)};
  }
  source.announced = true;
  source.tokens = tokens;
  if (call->tokens == 0) call->tokens = tokens;
  if (call->tokens == tokens) return std::nullopt;
  call->disputed = true;
  std::vector<std::string> sides;
  for (int64_t other = 0; other < tp(); ++other) {
    if (!call->sources[other].announced) continue;
    sides.push_back("rank " + Name(other) + " has " + std::to_string(call->sources[other].tokens) +
                    " tokens");
  }
  return Failure{Failure::kDisagreement,
                 "ranks disagree in " + Describe(call->key, tokens) + ": " + List(sides)};
}

void Group::Arrive(int64_t rank, const CallKey& key, const Buffers& buffers, Done done) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (owner_->broken()) {
    lock.unlock();
    Failure failure = *owner_->failure();
    done(&failure);
    return;
  }
  Call* call = FindOrAdd(key);
  Arrival& arrival = call->arrivals[local_index_[rank]];
  std::optional<Failure> fault;
  if (arrival.state != Arrival::kAbsent) {
    lock.unlock();
    fault = Failure{Failure::kDisagreement,
                    "rank " + Name(rank) + " came twice to " + Describe(key, buffers.tokens)};
    owner_->Break(*fault, true);
    done(&*fault);
    return;
  }
  if (call->num_local++ == 0) {
    call->since = Clock::now();
    call->owner = owner_->shared_from_this();
  }
  arrival.buffers = buffers;
  arrival.done = std::move(done);
  arrival.state = Arrival::kWaiting;
  fault = Admit(call, rank, buffers.tokens);
  if (!fault && words_) {
    Lane& lane = lanes_[rank];
    arrival.state = Arrival::kParked;
    words_->parked.fetch_add(1);  // before looking for room: who frees some will see it and ring
    bool announced = lane.unannounced.empty() && Announce(lane, call, rank);
    if (!announced) {
      lane.unannounced.push_back(call);
    } else if (!Allocate(lane, call, rank)) {
      lane.parked.push_back(call);
    } else {
      arrival.state = Arrival::kFilling;
      words_->parked.fetch_sub(1);
    }
    bool some_are_parked = words_->parked.load() > 0;
    bool is_parked = arrival.state == Arrival::kParked;
    lock.unlock();
    // A parked call may have become the one that may use the reserve.
    if (some_are_parked) RingPeers(true);
    if (is_parked) return;
    Fill(call, rank);
    lock.lock();
  } else if (!fault && spec_.top_k > 0) {
    arrival.state = Arrival::kFilling;
    lock.unlock();
    Fill(call, rank);
    lock.lock();
  }
  arrival.state = Arrival::kWaiting;
  ++call->num_local_ready;
  call->sources[rank].ready = true;
  if (!fault && words_) fault = ReadLogs();
  if (!fault && !owner_->broken() && AllReady(call)) {
    call->state = Call::kRunning;
    lock.unlock();
    std::vector<Pool::Job> completions;
    if (words_) RingPeers(false);
    Run(call, rank, &completions);
    for (Pool::Job& completion : completions) completion();
    return;
  }
  lock.unlock();
  // Also where somebody else found the fault while this rank's state kept it from being failed.
  if (fault) owner_->Break(*fault, true);
  if (owner_->broken()) FailPending(*owner_->failure());
}

std::optional<Failure> Group::ReadLogs() {
  // What a process announced before it left is seen below if its leaving is seen here.
  bool some_left = owner_->header()->num_left.load() > 0;
  for (int64_t rank = 0; rank < tp(); ++rank) {
    if (local_index_[rank] >= 0) continue;
    Lane& lane = lanes_[rank];
    while (true) {
      Entry& entry = EntryOf(lane, lane.next);
      uint64_t stamp = entry.stamp.load();
      if (stamp < Entry::Stamp(lane.next, Entry::kAnnounced)) break;
      Call* call = FindOrAdd(entry.key);
      std::optional<Failure> fault = Admit(call, rank, entry.tokens);
      Source& source = call->sources[rank];
      source.entry = &entry;
      source.number = lane.next++;
      if (fault) return fault;
    }
  }
  return some_left ? Abandoned() : std::nullopt;
}

// Whether a local rank waits for one whose process has left. What that process had finished counts.
std::optional<Failure> Group::Abandoned() {
  for (Call* call : calls_) {
    if (call->state != Call::kPending || call->num_local == 0) continue;
    for (int64_t rank = 0; rank < tp(); ++rank) {
      if (local_index_[rank] >= 0) continue;
      const Source& source = call->sources[rank];
      bool is_ready = source.announced &&
                      source.entry->stamp.load() == Entry::Stamp(source.number, Entry::kReady);
      if (is_ready || owner_->bell(ProcessOf(rank)).left.load() == 0) continue;
      return Failure{Failure::kClosed, "process " + std::to_string(ProcessOf(rank)) +
                                           " closed its communicator; rank " + Name(rank) +
                                           " did not come to " + Describe(call->key, call->tokens)};
    }
  }
  return std::nullopt;
}

bool Group::AllReady(Call* call) {
  if (call->disputed || call->num_local_ready < static_cast<int>(local_ranks_.size())) return false;
  for (int64_t rank = 0; rank < tp(); ++rank) {
    Source& source = call->sources[rank];
    if (source.ready) continue;
    if (!source.announced || local_index_[rank] >= 0) return false;
    uint64_t stamp = source.entry->stamp.load();
    if (stamp != Entry::Stamp(source.number, Entry::kReady)) return false;
    source.rows = reinterpret_cast<const uint16_t*>(lanes_[rank].arena + source.entry->offset);
    source.ready = true;
  }
  return true;
}

bool Group::Progress(std::vector<Pool::Job>* completions) {
  std::vector<Call*> to_run, to_finish;
  std::vector<std::pair<Call*, int64_t>> to_fill;
  std::unique_lock<std::mutex> lock(mutex_);
  if (owner_->broken()) return false;
  std::optional<Failure> fault = ReadLogs();
  if (!fault && Unpark(&to_fill)) {
    lock.unlock();
    for (auto [call, rank] : to_fill) Fill(call, rank);
    lock.lock();
    for (auto [call, rank] : to_fill) {
      call->arrivals[local_index_[rank]].state = Arrival::kWaiting;
      ++call->num_local_ready;
      call->sources[rank].ready = true;
    }
    fault = ReadLogs();
  }
  if (!fault && !owner_->broken()) {
    for (Call* call : calls_) {
      if (call->state == Call::kPending && AllReady(call)) {
        call->state = Call::kRunning;
        to_run.push_back(call);
      } else if (call->state == Call::kAwaitingRows && RowsDone(call)) {
        call->state = Call::kRunning;
        to_finish.push_back(call);
      }
    }
  }
  lock.unlock();
  if (fault) owner_->Break(*fault, true);
  if (owner_->broken()) FailPending(*owner_->failure());
  // This process's data was the last that somebody waited for.
  if (!to_fill.empty() && !to_run.empty()) RingPeers(false);
  for (Call* call : to_finish) Finish(call, completions);
  for (Call* call : to_run) Run(call, -1, completions);
  return !to_fill.empty() || !to_run.empty() || !to_finish.empty();
}

// ---------------------------------------------------------------------------------------------
// Room for a call's data

void Group::Reclaim(Lane& lane) {
  lane.blocks.erase(std::remove_if(lane.blocks.begin(), lane.blocks.end(),
                                   [this](const Lane::Block& block) {
                                     return block.entry->consumed.load() == num_processes_;
                                   }),
                    lane.blocks.end());
}

bool Group::Announce(Lane& lane, Call* call, int64_t rank) {
  Reclaim(lane);
  Entry& entry = EntryOf(lane, lane.next);
  if (lane.next >= kLogEntries && entry.consumed.load() < num_processes_) return false;
  entry.key = call->key;
  entry.tokens = call->sources[rank].tokens;
  entry.offset = 0;
  entry.rows_begun.store(0, std::memory_order_relaxed);
  entry.rows_done.store(0, std::memory_order_relaxed);
  entry.rows_awaited.store(0, std::memory_order_relaxed);
  entry.consumed.store(0, std::memory_order_relaxed);
  Source& source = call->sources[rank];
  source.entry = &entry;
  source.number = lane.next++;
  entry.stamp.store(Entry::Stamp(source.number, Entry::kAnnounced));
  return true;
}

bool Group::MayUseReserve(Call* call) {
  // The oldest call of rank 0 that somebody still needs may use the reserve of every rank: all come
  // to it without needing room for any later call, so it ends, and then the next is the oldest.
  while (true) {
    Entry& entry = EntryOf(lanes_[0], oldest_of_first_rank_);
    uint64_t number_and_state = entry.stamp.load();
    if (number_and_state < Entry::Stamp(oldest_of_first_rank_, Entry::kAnnounced)) return false;
    bool reused = number_and_state >= Entry::Stamp(oldest_of_first_rank_ + 1, Entry::kNone);
    if (!reused && entry.consumed.load() < num_processes_) break;
    ++oldest_of_first_rank_;
  }
  return call->sources[0].announced && call->sources[0].entry != nullptr &&
         call->sources[0].number == oldest_of_first_rank_;
}

bool Group::Allocate(Lane& lane, Call* call, int64_t rank) {
  Reclaim(lane);
  Source& source = call->sources[rank];
  uint64_t bytes = Slab(spec_, source.tokens, rank == 0, num_remote_[rank]).bytes;
  uint64_t offset = 0;
  auto block = lane.blocks.begin();
  for (; block != lane.blocks.end() && !block->is_reserve; ++block) {
    if (block->offset - offset >= bytes) break;
    offset = block->offset + block->bytes;
  }
  bool is_reserve = offset + bytes > arena_bytes_[rank];
  if (is_reserve) {
    bool is_free = lane.blocks.empty() || !lane.blocks.back().is_reserve;
    if (!is_free || !MayUseReserve(call)) return false;
    block = lane.blocks.end();
    offset = arena_bytes_[rank];
  }
  lane.blocks.insert(block, {offset, bytes, source.entry, is_reserve});
  source.entry->offset = offset;
  source.rows = reinterpret_cast<const uint16_t*>(lane.arena + offset);
  return true;
}

bool Group::Unpark(std::vector<std::pair<Call*, int64_t>>* to_fill) {
  for (int64_t rank : local_ranks_) {
    Lane& lane = lanes_[rank];
    while (!lane.unannounced.empty() && Announce(lane, lane.unannounced.front(), rank)) {
      lane.parked.push_back(lane.unannounced.front());
      lane.unannounced.pop_front();
    }
    for (auto next = lane.parked.begin(); next != lane.parked.end();) {
      Call* call = *next;
      if (!Allocate(lane, call, rank)) {
        ++next;  // a later one may be the one that may use the reserve
        continue;
      }
      call->arrivals[local_index_[rank]].state = Arrival::kFilling;
      to_fill->emplace_back(call, rank);
      next = lane.parked.erase(next);
      words_->parked.fetch_sub(1);
    }
  }
  return !to_fill->empty();
}

void Group::Fill(Call* call, int64_t rank) {
  Arrival& arrival = call->arrivals[local_index_[rank]];
  const Buffers& buffers = arrival.buffers;
  Source& source = call->sources[rank];
  int64_t tokens = source.tokens;
  uint16_t* common = nullptr;
  if (words_) {
    common = const_cast<uint16_t*>(source.rows);
  } else {
    arrival.contribution.resize(tokens * spec_.latent_dim);
    source.rows = common = arrival.contribution.data();
  }
  if (spec_.top_k > 0) {
    for (int64_t token = 0; token < tokens; ++token) {
      Finalize(buffers.rows, buffers.permuted_rows, buffers.weights + token * spec_.top_k,
               buffers.indices + token * spec_.top_k, spec_.top_k, spec_.latent_dim,
               common + token * spec_.latent_dim);
    }
  } else if (CommonColumns(spec_) > 0) {
    std::memcpy(common, spec_.gathers ? buffers.x : buffers.rows,
                tokens * CommonColumns(spec_) * sizeof(uint16_t));
  }
  if (!words_) return;
  Slab slab(spec_, tokens, rank == 0, num_remote_[rank]);
  int64_t columns = SliceColumns(spec_);
  for (int64_t destination = 0; columns > 0 && destination < tp(); ++destination) {
    int64_t index = slice_index_[rank][destination];
    if (index < 0) continue;
    char* slice = reinterpret_cast<char*>(common) + slab.slices + index * slab.slice_bytes;
    for (int64_t token = 0; token < tokens; ++token) {
      std::memcpy(slice + token * columns * sizeof(uint16_t),
                  buffers.shared + token * spec_.hidden_dim + destination * columns,
                  columns * sizeof(uint16_t));
    }
  }
  // Stamps are stored and loaded in one total order: of ranks that come at the same time, each
  // reading the others' stamps after storing its own, at least one sees that all have come.
  source.entry->stamp.store(Entry::Stamp(source.number, Entry::kReady));
}

// ---------------------------------------------------------------------------------------------
// The work, once all have come

void Group::Run(Call* call, int64_t arriving_rank, std::vector<Pool::Job>* completions) {
  int64_t num_local = static_cast<int64_t>(local_ranks_.size());
  call->num_tasks = call->tokens;
  if (spec_.gathers) {
    call->num_tasks = num_local;
  } else if (words_) {
    call->num_tasks = spec_.hidden_dim ? num_local : 0;
  }
  call->tasks_begun.store(0, std::memory_order_relaxed);
  call->tasks_done.store(0, std::memory_order_relaxed);
  call->copies_left.store(static_cast<int>(num_local), std::memory_order_relaxed);
  int64_t elements = call->tokens * tp() *
                     (words_ ? spec_.latent_dim + num_local * spec_.hidden_dim / tp()
                             : spec_.latent_dim + spec_.hidden_dim);
  int64_t helpers = 0;
  static const int64_t cores = AvailableCores();
  if (elements >= kElementsWorthSharing) {
    helpers = std::max<int64_t>(0, std::min({num_local - 1, cores - 1, call->num_tasks - 1}));
  }
  call->references.store(static_cast<int>(1 + helpers + num_local), std::memory_order_relaxed);
  for (int64_t helper = 0; helper < helpers; ++helper) {
    Pool::Get().Push([this, call] {
      if (Work(call)) {
        std::vector<Pool::Job> completions;
        Finish(call, &completions);
        for (size_t i = 0; i + 1 < completions.size(); ++i) {
          Pool::Get().Push(std::move(completions[i]));
        }
        Drop(call);
        completions.back()();
      } else {
        Drop(call);
      }
    });
  }
  std::vector<Pool::Job> own;
  if (Work(call)) Finish(call, &own);
  Drop(call);
  if (arriving_rank < 0) {
    for (Pool::Job& job : own) completions->push_back(std::move(job));
    return;
  }
  // The arriving thread is its rank's, which goes on when this returns.
  for (size_t local = 0; local < own.size(); ++local) {
    if (static_cast<int64_t>(local) == local_index_[arriving_rank]) {
      completions->push_back(std::move(own[local]));
    } else {
      Pool::Get().Push(std::move(own[local]));
    }
  }
}

// True for the one thread that finds the call's results complete and has to finish it.
bool Group::Work(Call* call) {
  if (words_ && spec_.latent_dim > 0) {
    Entry& entry = *call->sources[0].entry;
    uint32_t tokens = static_cast<uint32_t>(call->tokens);
    while (entry.rows_begun.load(std::memory_order_relaxed) < tokens) {
      uint32_t token = entry.rows_begun.fetch_add(1, std::memory_order_relaxed);
      if (token >= tokens) break;
      DoRow(call, token);
      if (entry.rows_done.fetch_add(1) + 1 == tokens && entry.rows_awaited.load()) RingPeers(true);
    }
  }
  if (call->num_tasks == 0) return AwaitRows(call);
  while (true) {
    int64_t task = call->tasks_begun.fetch_add(1, std::memory_order_relaxed);
    if (task >= call->num_tasks) return false;
    if (spec_.gathers) {
      DoGather(call, task);
    } else if (words_) {
      DoShard(call, task);
    } else {
      DoToken(call, task);
    }
    if (call->tasks_done.fetch_add(1, std::memory_order_acq_rel) + 1 == call->num_tasks) {
      return AwaitRows(call);
    }
  }
}

// Where all ranks are of this process: everything of one token.
void Group::DoToken(Call* call, int64_t token) {
  thread_local std::vector<const uint16_t*> rows;
  rows.resize(tp());
  if (spec_.latent_dim > 0) {
    for (int64_t rank = 0; rank < tp(); ++rank) {
      const uint16_t* base =
          spec_.top_k > 0 ? call->sources[rank].rows : call->arrivals[rank].buffers.rows;
      rows[rank] = base + token * spec_.latent_dim;
    }
    uint16_t* first = call->arrivals[0].buffers.latent + token * spec_.latent_dim;
    SumAndNorm(rows.data(), tp(), call->arrivals[0].buffers.gamma, spec_.latent_dim, spec_.eps,
               spec_.fp32_internal, first);
    for (int64_t rank = 1; rank < tp(); ++rank) {
      std::memcpy(call->arrivals[rank].buffers.latent + token * spec_.latent_dim, first,
                  spec_.latent_dim * sizeof(uint16_t));
    }
  }
  if (spec_.hidden_dim > 0) {
    for (int64_t rank = 0; rank < tp(); ++rank) {
      rows[rank] = call->arrivals[rank].buffers.shared + token * spec_.hidden_dim;
    }
    int64_t columns = spec_.shard_dim();
    for (int64_t rank = 0; rank < tp(); ++rank) {
      Sum(rows.data(), tp(), rank * columns, columns,
          call->arrivals[rank].buffers.shard + token * columns);
    }
  }
}

// Where they are not: one row of the all-reduce, into rank 0's slab.
void Group::DoRow(Call* call, int64_t token) {
  thread_local std::vector<const uint16_t*> rows;
  rows.resize(tp());
  for (int64_t rank = 0; rank < tp(); ++rank) {
    rows[rank] = call->sources[rank].rows + token * spec_.latent_dim;
  }
  Slab slab(spec_, call->tokens, true, num_remote_[0]);
  char* first = reinterpret_cast<char*>(const_cast<uint16_t*>(call->sources[0].rows));
  uint16_t* latent = reinterpret_cast<uint16_t*>(first + slab.latent);
  SumAndNorm(rows.data(), tp(), call->arrivals[0].buffers.gamma, spec_.latent_dim, spec_.eps,
             spec_.fp32_internal, latent + token * spec_.latent_dim);
}

// And a local rank's shard, straight into its result.
void Group::DoShard(Call* call, int64_t local) {
  thread_local std::vector<const uint16_t*> rows;
  rows.resize(tp());
  int64_t destination = local_ranks_[local];
  int64_t columns = spec_.shard_dim();
  uint16_t* shard = call->arrivals[local].buffers.shard;
  for (int64_t token = 0; token < call->tokens; ++token) {
    for (int64_t rank = 0; rank < tp(); ++rank) {
      if (local_index_[rank] >= 0) {
        rows[rank] = call->arrivals[local_index_[rank]].buffers.shared + token * spec_.hidden_dim +
                     destination * columns;
      } else {
        Slab slab(spec_, call->tokens, rank == 0, num_remote_[rank]);
        const char* slices = reinterpret_cast<const char*>(call->sources[rank].rows) + slab.slices;
        rows[rank] = reinterpret_cast<const uint16_t*>(slices + slice_index_[rank][destination] *
                                                                    slab.slice_bytes) +
                     token * columns;
      }
    }
    Sum(rows.data(), tp(), 0, columns, shard + token * columns);
  }
}

// A local rank's whole result of a gather, wherever the others are. Each rank adds its own
// residual, as in plain collectives: another process's is out of reach.
void Group::DoGather(Call* call, int64_t local) {
  const Buffers& own = call->arrivals[local].buffers;
  int64_t columns = spec_.shard_dim();
  for (int64_t rank = 0; rank < tp(); ++rank) {
    int64_t index = local_index_[rank];
    const uint16_t* x = index >= 0 ? call->arrivals[index].buffers.x : call->sources[rank].rows;
    for (int64_t token = 0; token < call->tokens; ++token) {
      const uint16_t* row = x + token * columns;
      int64_t offset = token * spec_.hidden_dim + rank * columns;
      if (spec_.has_residual) {
        Add(row, own.residual + offset, columns, own.gathered + offset);
      } else {
        std::memcpy(own.gathered + offset, row, columns * sizeof(uint16_t));
      }
    }
  }
}

bool Group::RowsDone(Call* call) const {
  if (!words_ || spec_.latent_dim == 0) return true;
  return call->sources[0].entry->rows_done.load() == static_cast<uint32_t>(call->tokens);
}

// Other processes may still be at the last rows: looks a while, then leaves the call to the
// listener.
bool Group::AwaitRows(Call* call) {
  for (int spin = 0; spin < owner_->spins_ + 100; ++spin) {
    if (RowsDone(call)) return true;
    SpinPause(spin);
  }
  std::unique_lock<std::mutex> lock(mutex_);
  call->sources[0].entry->rows_awaited.store(1);
  if (RowsDone(call)) return true;
  call->state = Call::kAwaitingRows;
  bool broken = owner_->broken();
  lock.unlock();
  if (broken) FailPending(*owner_->failure());
  return false;
}

void Group::Finish(Call* call, std::vector<Pool::Job>* completions) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Remove(call);
  }
  for (size_t local = 0; local < local_ranks_.size(); ++local) {
    completions->push_back([this, call, local] { Complete(call, local); });
  }
}

void Group::Complete(Call* call, size_t local) {
  Arrival& arrival = call->arrivals[local];
  // The communicator may be dropped by others as soon as the call is.
  std::shared_ptr<Communicator> owner = call->owner;
  if (words_ && spec_.latent_dim > 0) {
    Slab slab(spec_, call->tokens, true, num_remote_[0]);
    const char* first = reinterpret_cast<const char*>(call->sources[0].rows);
    std::memcpy(arrival.buffers.latent, first + slab.latent,
                call->tokens * spec_.latent_dim * sizeof(uint16_t));
  }
  Done done = std::move(arrival.done);
  arrival.done = nullptr;
  if (words_ && call->copies_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    bool freed = false;
    for (Source& source : call->sources) {
      freed |= source.entry->consumed.fetch_add(1) + 1 == num_processes_;
    }
    if (freed && words_->parked.load() > 0) RingPeers(true);
  }
  Drop(call);
  done(nullptr);
}

void Group::Drop(Call* call) {
  if (call->references.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  std::shared_ptr<Communicator> owner = std::move(call->owner);
  std::lock_guard<std::mutex> lock(mutex_);
  Recycle(call);
}

void Group::RingPeers(bool and_self) const {
  for (int32_t peer : peers_) owner_->Ring(peer);
  if (and_self) owner_->Ring(owner_->configuration_.process);
}

// ---------------------------------------------------------------------------------------------
// Failure

void Group::FailPending(const Failure& failure) {
  std::vector<Done> dones;
  std::vector<Call*> dropped;
  std::vector<std::shared_ptr<Communicator>> owners;  // released after the lock
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Lane& lane : lanes_) {
      lane.unannounced.clear();
      lane.parked.clear();
    }
    for (size_t i = 0; i < calls_.size();) {
      Call* call = calls_[i];
      bool is_busy = call->state == Call::kRunning;
      for (Arrival& arrival : call->arrivals) is_busy |= arrival.state == Arrival::kFilling;
      if (is_busy) {  // ends by itself or comes here again
        ++i;
        continue;
      }
      for (Arrival& arrival : call->arrivals) {
        if (arrival.state == Arrival::kAbsent) continue;
        dones.push_back(std::move(arrival.done));
        arrival.done = nullptr;
        if (call->state == Call::kAwaitingRows) dropped.push_back(call);
      }
      calls_[i] = calls_.back();
      calls_.pop_back();
      if (call->state == Call::kPending) {
        owners.push_back(std::move(call->owner));
        Recycle(call);
      }
    }
  }
  for (Done& done : dones) {
    Pool::Get().Push([done = std::move(done), failure] { done(&failure); });
  }
  for (Call* call : dropped) Drop(call);  // the references of its completions
}

std::optional<Failure> Group::Overdue(Clock::time_point now) {
  std::chrono::duration<double> deadline(owner_->configuration_.deadline_s);
  std::lock_guard<std::mutex> lock(mutex_);
  for (Call* call : calls_) {
    if (call->num_local == 0 || now - call->since < deadline) continue;
    if (call->state == Call::kRunning) continue;
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), "%g s", owner_->configuration_.deadline_s);
    std::string text;
    if (call->state == Call::kAwaitingRows) {
      text = "for " + std::string(seconds) + " a process has not finished its part of " +
             Describe(call->key, call->tokens);
      return Failure{Failure::kTimeout, text};
    }
    std::vector<std::string> missing, waiting, elsewhere;
    for (int64_t rank = 0; rank < tp(); ++rank) {
      if (call->sources[rank].announced) {
        waiting.push_back(Name(rank));
        continue;
      }
      missing.push_back(Name(rank));
      for (Call* other : calls_) {
        if (other == call || !other->sources[rank].announced) continue;
        elsewhere.push_back("rank " + std::to_string(rank) + " is in " +
                            Describe(other->key, other->sources[rank].tokens));
        if (elsewhere.size() == 4) break;
      }
    }
    if (missing.empty()) {
      text = "for " + std::string(seconds) + " there was no room for the data of " +
             Describe(call->key, call->tokens);
    } else {
      text = "after " + std::string(seconds) + " rank " + List(missing) + " has not come to " +
             Describe(call->key, call->tokens) + ", where rank " + List(waiting) +
             " waits; all processes must run the same programs in the same order";
      if (!elsewhere.empty()) text += "; " + List(elsewhere);
    }
    return Failure{Failure::kTimeout, text};
  }
  return std::nullopt;
}

// ---------------------------------------------------------------------------------------------
// The communicator

namespace {

uint64_t HeaderBytes(int32_t num_processes) {
  return Align(sizeof(SegmentHeader)) + num_processes * sizeof(Bell);
}

int32_t NumProcesses(const Configuration& configuration) {
  return *std::max_element(configuration.processes.begin(), configuration.processes.end()) + 1;
}

uint64_t Mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 29);
}

// Of everything that decides the layout or the values.
uint64_t Hash(const Configuration& configuration) {
  const Spec& spec = configuration.spec;
  uint32_t eps;
  std::memcpy(&eps, &spec.eps, sizeof(eps));
  uint64_t hash = 1;  // version of the layout
  for (uint64_t value :
       {uint64_t{sizeof(Entry)}, kLogEntries, static_cast<uint64_t>(spec.tp),
        static_cast<uint64_t>(spec.latent_dim), static_cast<uint64_t>(spec.hidden_dim),
        static_cast<uint64_t>(spec.top_k), static_cast<uint64_t>(spec.max_tokens), uint64_t{eps},
        uint64_t{spec.fp32_internal}, uint64_t{spec.gathers}, uint64_t{spec.has_residual}}) {
    hash = Mix(hash, value);
  }
  for (int64_t device : configuration.devices) hash = Mix(hash, device);
  for (int32_t process : configuration.processes) hash = Mix(hash, process);
  return hash ? hash : 1;
}

// The watchdog's list is never destroyed: its thread may be in it when the process ends.
struct Watchdog {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::weak_ptr<Communicator>> communicators;
  bool runs = false;

  static Watchdog& Get() {
    static Watchdog* watchdog = new Watchdog;
    return *watchdog;
  }

  void Add(const std::shared_ptr<Communicator>& communicator) {
    std::lock_guard<std::mutex> lock(mutex);
    communicators.push_back(communicator);
    changed.notify_one();
    if (runs) return;
    runs = true;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    std::thread([this] { Watch(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void Watch() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      double pause_s = 1;
      std::vector<std::shared_ptr<Communicator>> alive;
      for (size_t i = 0; i < communicators.size();) {
        auto communicator = communicators[i].lock();
        if (!communicator) {
          communicators[i] = communicators.back();
          communicators.pop_back();
          continue;
        }
        pause_s = std::min(pause_s, communicator->configuration().deadline_s / 8);
        alive.push_back(std::move(communicator));
        ++i;
      }
      if (alive.empty()) {
        changed.wait(lock);
        continue;
      }
      lock.unlock();
      Clock::time_point now = Clock::now();
      for (auto& communicator : alive) communicator->CheckDeadlines(now);
      alive.clear();
      lock.lock();
      changed.wait_for(lock, std::chrono::duration<double>(std::max(pause_s, 0.005)));
    }
  }
};

}  // namespace

int64_t Communicator::SegmentBytes(const Configuration& configuration) {
  uint64_t bytes = 0;
  for (size_t first = 0; first < configuration.devices.size(); first += configuration.spec.tp) {
    bytes += Group::Bytes(configuration, first);
  }
  return bytes ? static_cast<int64_t>(bytes + HeaderBytes(NumProcesses(configuration))) : 0;
}

std::shared_ptr<Communicator> Communicator::Create(Configuration configuration, void* segment,
                                                   bool owns_segment, std::string* fault) {
  static const int registered = pthread_atfork(
      nullptr, nullptr, [] { is_forked_child.store(true, std::memory_order_relaxed); });
  bool sound = registered == 0 && configuration.spec.tp > 0 && !configuration.devices.empty() &&
               configuration.devices.size() == configuration.processes.size() &&
               configuration.devices.size() % configuration.spec.tp == 0 &&
               configuration.deadline_s > 0;
  if (!sound || IsForkedChild()) {
    *fault = sound ? "this is a forked child process" : "the configuration contradicts itself";
    return nullptr;
  }
  int64_t bytes = SegmentBytes(configuration);
  if (bytes > 0 && segment == nullptr) {
    *fault = "a group spans processes, and there is no shared segment";
    return nullptr;
  }
  if (bytes > 0) {
    uint64_t expected = 0, own = Hash(configuration);
    auto* header = static_cast<SegmentHeader*>(segment);
    if (!header->configuration.compare_exchange_strong(expected, own) && expected != own) {
      *fault = "another process gave the shared segment a different configuration";
      return nullptr;
    }
    if (owns_segment) madvise(segment, bytes, MADV_DONTFORK);
  }
  std::shared_ptr<Communicator> communicator(
      new Communicator(std::move(configuration), bytes > 0 ? segment : nullptr, owns_segment));
  Watchdog::Get().Add(communicator);
  if (bytes > 0) communicator->StartListener();
  return communicator;
}

Communicator::Communicator(Configuration configuration, void* segment, bool owns_segment)
    : configuration_(std::move(configuration)),
      segment_(segment),
      owns_segment_(owns_segment),
      segment_bytes_(SegmentBytes(configuration_)),
      num_processes_(NumProcesses(configuration_)) {
  // Spinning beside processes that have no core for themselves only delays them.
  if (num_processes_ <= AvailableCores() && AvailableCores() > 1) spins_ = kSpins;
  char* memory = segment ? static_cast<char*>(segment) + HeaderBytes(num_processes_) : nullptr;
  for (size_t first = 0; first < configuration_.devices.size(); first += configuration_.spec.tp) {
    uint64_t bytes = Group::Bytes(configuration_, first);
    groups_.push_back(std::make_unique<Group>(this, first, bytes ? memory : nullptr));
    if (bytes) memory += bytes;
  }
}

Communicator::~Communicator() {
  groups_.clear();
  if (segment_ && owns_segment_) munmap(segment_, segment_bytes_);
}

int64_t Communicator::PositionOf(int64_t device) const {
  for (size_t position = 0; position < configuration_.devices.size(); ++position) {
    if (configuration_.devices[position] != device) continue;
    if (configuration_.processes[position] != configuration_.process) return -1;
    return static_cast<int64_t>(position);
  }
  return -1;
}

int64_t Communicator::LaunchOf(uint64_t executable, int64_t run) {
  std::lock_guard<std::mutex> lock(launches_mutex_);
  return run - first_runs_.try_emplace(executable, run).first->second;
}

void Communicator::Arrive(int64_t position, const CallKey& key, const Buffers& buffers, Done done) {
  std::optional<Failure> fault;
  if (IsForkedChild()) {
    fault = Failure{Failure::kForked, "the process was forked from one that uses JAX"};
  } else if (buffers.tokens > configuration_.spec.max_tokens) {
    fault = Failure{Failure::kInvalid, std::to_string(buffers.tokens) +
                                           " tokens are more than max_tokens " +
                                           std::to_string(configuration_.spec.max_tokens)};
  }
  if (fault) {
    done(&*fault);
    return;
  }
  // Once the arrival is on record another thread may fail it, and who hears of that may let go.
  std::shared_ptr<Communicator> self = shared_from_this();
  if (segment_ && header()->broken.load(std::memory_order_relaxed) && !broken()) AdoptBreak();
  int64_t tp = configuration_.spec.tp;
  groups_[position / tp]->Arrive(position % tp, key, buffers, std::move(done));
}

std::optional<Failure> Communicator::failure() const {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  return failure_;
}

void Communicator::Break(Failure failure, bool tell_peers) {
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (failure_) return;
    failure_ = failure;
    broken_.store(true, std::memory_order_release);
  }
  if (segment_ && tell_peers) {
    uint32_t sound = SegmentHeader::kSound;
    if (header()->broken.compare_exchange_strong(sound, SegmentHeader::kWriting)) {
      header()->code = failure.code;
      std::snprintf(header()->reason, sizeof(header()->reason), "%s", failure.message.c_str());
      header()->broken.store(SegmentHeader::kBroken, std::memory_order_release);
    }
    for (int32_t process = 0; process < num_processes_; ++process) Ring(process);
  }
  for (auto& group : groups_) group->FailPending(failure);
}

void Communicator::AdoptBreak() {
  if (header()->broken.load(std::memory_order_acquire) != SegmentHeader::kBroken) return;
  Break({static_cast<Failure::Code>(header()->code), header()->reason}, false);
}

void Communicator::Close() {
  if (IsForkedChild() || closed_.exchange(true)) return;
  Break({Failure::kClosed, "the communicator was closed"}, false);
  if (!segment_) return;
  // Peers may still be busy with calls that this process is through with; only what it has not come
  // to fails there.
  Bell& own = bell(configuration_.process);
  own.left.store(1);
  header()->num_left.fetch_add(1);
  for (int32_t process = 0; process < num_processes_; ++process) Ring(process);
  FutexWake(own.rings, INT_MAX);
}

void Communicator::CheckDeadlines(Clock::time_point now) {
  if (broken()) return;
  if (segment_ && header()->broken.load(std::memory_order_relaxed)) AdoptBreak();
  for (auto& group : groups_) {
    if (auto failure = group->Overdue(now)) {
      Break(*failure, true);
      return;
    }
  }
}

Bell& Communicator::bell(int32_t process) const {
  char* bells = static_cast<char*>(segment_) + Align(sizeof(SegmentHeader));
  return reinterpret_cast<Bell*>(bells)[process];
}

void Communicator::Ring(int32_t process) const {
  Bell& rung = bell(process);
  rung.rings.fetch_add(1);
  if (rung.spinning.load() == 0 && rung.sleeping.load() > 0) FutexWake(rung.rings, 1);
}

void Communicator::StartListener() {
  listeners_.fetch_add(1);
  Pool::Get().Push([self = shared_from_this()] { self->Listen(); });
}

void Communicator::Listen() {
  Bell& own = bell(configuration_.process);
  std::vector<Pool::Job> completions;
  while (!closed_.load()) {
    uint32_t seen = own.rings.load();
    if (!broken() && header()->broken.load(std::memory_order_relaxed)) AdoptBreak();
    bool worked = false;
    for (auto& group : groups_) {
      if (group->spans_processes()) worked |= group->Progress(&completions);
    }
    if (!completions.empty()) {
      for (size_t i = 0; i + 1 < completions.size(); ++i) {
        Pool::Get().Push(std::move(completions[i]));
      }
      Pool::Job last = std::move(completions.back());
      completions.clear();
      // A rank's program goes on here for as long as it likes: somebody else must listen.
      if (listeners_.fetch_sub(1) == 1) StartListener();
      last();
      if (listeners_.fetch_add(1) >= 2) {  // enough of them
        listeners_.fetch_sub(1);
        return;
      }
      continue;
    }
    if (worked) continue;
    if (spins_ > 0) {
      own.spinning.fetch_add(1);
      for (int spin = 0; spin < spins_ && own.rings.load() == seen; ++spin) SpinPause(spin);
      own.spinning.fetch_sub(1);
    }
    own.sleeping.fetch_add(1);
    // In a second at the latest somebody who died while telling of a fault has been noticed.
    if (own.rings.load() == seen) FutexWait(own.rings, seen, 1'000'000'000);
    own.sleeping.fetch_sub(1);
  }
  listeners_.fetch_sub(1);
}

}  // namespace latent_tail::cpu
