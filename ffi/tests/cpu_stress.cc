// Random programs on the CPU engine: every rank runs the same launches of the same call sites, each
// in an order of its own, on threads and in processes, with delays and with ranks that block.
// Results are compared with sums computed one element at a time. Prints one line per scenario;
// exits with 1 at the first fault, and is killed by its own alarm if something hangs.
//
//   cpu_stress [--seed N] [--rounds N] [--only NAME]

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu_engine.h"
#include "cpu_pool.h"

namespace latent_tail::cpu {
namespace {

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                   \
      std::fprintf(stderr, "\n");                                          \
      std::fflush(nullptr);                                                \
      _exit(1);                                                            \
    }                                                                      \
  } while (false)

float FromBf16(uint16_t word) {
  uint32_t bits = uint32_t{word} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint16_t ToBf16(double value) {  // of values that fp32 holds exactly
  float rounded = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &rounded, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

int64_t Ordinal(uint16_t word) { return (word & 0x8000) ? -int64_t{word & 0x7FFF} : int64_t{word}; }

uint64_t Hash(std::initializer_list<uint64_t> values) {
  uint64_t hash = 0x243F6A8885A308D3;
  for (uint64_t value : values) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 31;
  }
  return hash;
}

// Integers of magnitude 1..8, so that sums over ranks are exact and an absent or foreign summand
// shows.
float Value(const CallKey& key, uint64_t what, uint64_t rank, uint64_t element) {
  uint64_t hash =
      Hash({static_cast<uint64_t>(key.run), key.program, key.site, key.count, what, rank, element});
  float magnitude = 1 + static_cast<float>(hash % 8);
  return (hash >> 20) & 1 ? magnitude : -magnitude;
}

// Threads for the ranks' own first steps, as few as the scenario says: XLA's may be fewer than
// ranks.
class Threads {
 public:
  explicit Threads(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { Work(); });
  }
  ~Threads() {
    Push(nullptr);
    for (std::thread& thread : threads_) thread.join();
  }
  void Push(std::function<void()> job) {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    wake_.notify_one();
  }

 private:
  void Work() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return !jobs_.empty(); });
      if (!jobs_.front()) {
        wake_.notify_one();
        return;
      }
      auto job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> jobs_;
  std::vector<std::thread> threads_;
};

struct Scenario {
  std::string name;
  int groups = 1;
  int tp = 2;
  int processes = 1;
  bool fork = false;  // processes are processes; else they share this one and its memory
  int64_t latent_dim = 24;
  int64_t shard_dim = 8;  // 0 for no shared half
  int64_t top_k = 0;
  bool fp32_internal = false;
  bool gathers = false;  // all_gather_add in place of the tail
  bool has_residual = false;
  int64_t max_tokens = 8;
  bool always_max_tokens = false;
  int launches = 10;
  int branches = 4;
  int chain = 3;
  int threads = 2;
  bool ranks_block = false;      // each chain ends where all local ranks wait for each other
  bool processes_block = false;  // or those of all processes do
  bool delays = false;
  double deadline_s = 100;
  // Faults: the rank that stops coming, or comes with other tokens, at this launch.
  int deserter = -1;
  bool leaves = false;  // it closes its communicator at once
  int liar = -1;
  int fault_launch = -1;
  std::string expect;  // in every failure's text
};

struct Buffer {
  std::vector<uint16_t> rows, weights, gamma, shared, latent, shard, x, residual, gathered;
  std::vector<int32_t> indices;
};

// Several launches of one rank: branches in an order of the rank's own, each a chain of calls.
class Rank;

class Process {
 public:
  Process(const Scenario& scenario, int index, void* segment, std::atomic<int>* meetings,
          uint64_t seed)
      : scenario_(scenario),
        index_(index),
        seed_(seed),
        meetings_of_all_(meetings),
        threads_(scenario.threads) {
    Configuration configuration = Configure(scenario);
    configuration.process = index;
    std::string fault;
    communicator_ = Communicator::Create(configuration, segment, false, &fault);
    CHECK(communicator_, "%s", fault.c_str());
  }

  static Configuration Configure(const Scenario& scenario) {
    Configuration configuration;
    configuration.spec.tp = scenario.tp;
    configuration.spec.latent_dim = scenario.gathers ? 0 : scenario.latent_dim;
    configuration.spec.hidden_dim = scenario.shard_dim * scenario.tp;
    configuration.spec.top_k = scenario.top_k;
    configuration.spec.max_tokens = scenario.max_tokens;
    configuration.spec.eps = 1e-6f;
    configuration.spec.fp32_internal = scenario.fp32_internal;
    configuration.spec.gathers = scenario.gathers;
    configuration.spec.has_residual = scenario.has_residual;
    configuration.deadline_s = scenario.deadline_s;
    for (int device = 0; device < scenario.groups * scenario.tp; ++device) {
      configuration.devices.push_back(100 + device);
      configuration.processes.push_back(device % scenario.processes);
    }
    return configuration;
  }

  void Run();

  // Closes the communicator and waits until nothing of it touches the segment any more.
  void CloseAndWait() {
    std::weak_ptr<Communicator> left = communicator_;
    communicator_->Close();
    communicator_.reset();
    auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!left.expired()) {
      CHECK(std::chrono::steady_clock::now() < deadline, "%s: the communicator lives on",
            scenario_.name.c_str());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  friend class Rank;

  const Scenario& scenario_;
  const int index_;
  const uint64_t seed_;
  std::atomic<int>* const meetings_of_all_;  // [launch * branches + branch], shared
  std::shared_ptr<Communicator> communicator_;
  Threads threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int running_ = 0;
  std::vector<std::string> failures_;
  std::vector<std::vector<int>> meetings_;  // [group][launch * branches + branch] ranks there
  int local_ranks_ = 0;
};

class Rank {
 public:
  Rank(Process* process, int64_t position)
      : process_(process),
        scenario_(process->scenario_),
        position_(position),
        random_(Hash({process->seed_, static_cast<uint64_t>(position)})) {}

  void Launch(int launch) {
    if (launch == scenario_.launches || failed_) {
      std::lock_guard<std::mutex> lock(process_->mutex_);
      --process_->running_;
      process_->changed_.notify_all();
      return;
    }
    if (position_ % scenario_.tp == scenario_.deserter && launch == scenario_.fault_launch) {
      failed_ = true;
      Launch(launch);
      return;
    }
    open_branches_ = scenario_.branches;
    std::vector<int> order(scenario_.branches);
    for (int branch = 0; branch < scenario_.branches; ++branch) order[branch] = branch;
    std::shuffle(order.begin(), order.end(), random_);
    for (int branch : order) {
      process_->threads_.Push([this, launch, branch] { Step(launch, branch, 0); });
    }
  }

 private:
  int64_t rank() const { return position_ % scenario_.tp; }

  CallKey Key(int launch, int branch, int count) const {
    return {launch, 7, static_cast<uint64_t>(branch), static_cast<uint64_t>(count)};
  }

  int64_t Tokens(const CallKey& key) const {
    if (scenario_.always_max_tokens) return scenario_.max_tokens;
    return 1 + Hash({static_cast<uint64_t>(key.run), key.site, key.count}) % scenario_.max_tokens;
  }

  void Step(int launch, int branch, int count) {
    if (scenario_.delays) Delay();
    CallKey key = Key(launch, branch, count);
    auto buffer = std::make_shared<Buffer>();
    Buffers buffers = Prepare(key, buffer.get());
    if (rank() == scenario_.liar && launch == scenario_.fault_launch) {
      buffers.tokens = buffers.tokens == 1 ? 2 : buffers.tokens - 1;
      buffer->rows.resize(std::max<size_t>(buffer->rows.size(), 2 * scenario_.latent_dim));
      buffer->shared.resize(buffer->rows.size() * scenario_.tp * scenario_.shard_dim + 1000);
      buffers.rows = buffer->rows.data();
      buffers.shared = buffer->shared.data();
      buffer->x.resize(std::max<size_t>(buffer->x.size(), 2 * scenario_.shard_dim));
      buffers.x = buffer->x.data();
    }
    process_->communicator_->Arrive(
        position_, key, buffers,
        [this, launch, branch, count, key, buffer](const Failure* failure) {
          if (failure) {
            Fail(*failure);
          } else {
            Verify(key, *buffer);
            if (count + 1 < scenario_.chain) {
              Step(launch, branch, count + 1);
              return;
            }
            if (scenario_.ranks_block) Meet(launch, branch);
            if (scenario_.processes_block) MeetEverywhere(launch, branch);
          }
          if (open_branches_.fetch_sub(1) == 1) {
            process_->threads_.Push([this, launch] { Launch(launch + 1); });
          }
        });
  }

  void Delay() {
    uint64_t draw;
    {
      std::lock_guard<std::mutex> lock(random_mutex_);
      draw = random_();
    }
    if (draw % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw / 4 % 500));
    if (draw % 4 == 1) std::this_thread::yield();
  }

  void Fail(const Failure& failure) {
    failed_ = true;
    std::lock_guard<std::mutex> lock(process_->mutex_);
    process_->failures_.push_back(failure.message);
    process_->changed_.notify_all();
  }

  // As a collective of XLA would: blocks the thread until all local ranks of the group are here.
  void Meet(int launch, int branch) {
    int group = static_cast<int>(position_ / scenario_.tp);
    std::unique_lock<std::mutex> lock(process_->mutex_);
    int& here = process_->meetings_[group][launch * scenario_.branches + branch];
    ++here;
    process_->changed_.notify_all();
    process_->changed_.wait(lock, [&] {
      return here == process_->local_ranks_ / scenario_.groups || !process_->failures_.empty();
    });
  }

  // As gloo would: blocks the thread until the ranks of all processes are here, which other calls
  // of the same processes may have to bring.
  void MeetEverywhere(int launch, int branch) {
    std::atomic<int>& here = process_->meetings_of_all_[launch * scenario_.branches + branch];
    here.fetch_add(1);
    while (here.load() < scenario_.groups * scenario_.tp) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  // Expert rows: row p of rank r has the value Value(.., 3, r, p * columns + c); half the slots are
  // skipped and point, by their magnitude, at NaN.
  Buffers Prepare(const CallKey& key, Buffer* buffer) {
    int64_t tokens = Tokens(key), columns = scenario_.latent_dim;
    int64_t hidden = scenario_.shard_dim * scenario_.tp;
    Buffers buffers;
    buffers.tokens = tokens;
    if (scenario_.gathers) {
      buffer->x.resize(tokens * scenario_.shard_dim);
      for (int64_t i = 0; i < tokens * scenario_.shard_dim; ++i) {
        buffer->x[i] = ToBf16(Value(key, 5, rank(), i));
      }
      buffers.x = buffer->x.data();
      if (scenario_.has_residual) {
        buffer->residual.resize(tokens * hidden);
        for (int64_t i = 0; i < tokens * hidden; ++i) {
          buffer->residual[i] = ToBf16(Value(key, 6, 0, i));
        }
        buffers.residual = buffer->residual.data();
      }
      buffer->gathered.assign(tokens * hidden, 0x7FC0);
      buffers.gathered = buffer->gathered.data();
      return buffers;
    }
    if (columns > 0) {
      int64_t num_rows = scenario_.top_k ? tokens * scenario_.top_k : tokens;
      buffer->rows.resize(num_rows * columns);
      for (int64_t i = 0; i < num_rows * columns; ++i) {
        buffer->rows[i] = ToBf16(Value(key, 1, rank(), i));
      }
      if (scenario_.top_k) {
        buffers.permuted_rows = num_rows;
        buffer->weights.resize(num_rows);
        buffer->indices.resize(num_rows);
        for (int64_t i = 0; i < num_rows; ++i) {
          buffer->weights[i] = ToBf16(Value(key, 2, rank(), i));
          bool skipped = Value(key, 3, rank(), i) > 0;
          buffer->indices[i] = static_cast<int32_t>(skipped ? -1 - i : i);
          if (skipped) std::fill_n(&buffer->rows[i * columns], columns, 0x7FC0);
        }
        buffers.weights = buffer->weights.data();
        buffers.indices = buffer->indices.data();
      }
      buffer->gamma.resize(columns);
      for (int64_t c = 0; c < columns; ++c) buffer->gamma[c] = ToBf16(1 + c % 3);
      buffer->latent.assign(tokens * columns, 0x7FC0);
      buffers.rows = buffer->rows.data();
      buffers.gamma = buffer->gamma.data();
      buffers.latent = buffer->latent.data();
    }
    if (hidden > 0) {
      buffer->shared.resize(tokens * hidden);
      for (int64_t i = 0; i < tokens * hidden; ++i) {
        buffer->shared[i] = ToBf16(Value(key, 4, rank(), i));
      }
      buffer->shard.assign(tokens * scenario_.shard_dim, 0x7FC0);
      buffers.shared = buffer->shared.data();
      buffers.shard = buffer->shard.data();
    }
    return buffers;
  }

  double Contribution(const CallKey& key, int64_t from, int64_t token, int64_t column) const {
    int64_t columns = scenario_.latent_dim;
    if (!scenario_.top_k) return Value(key, 1, from, token * columns + column);
    double sum = 0;
    for (int64_t k = 0; k < scenario_.top_k; ++k) {
      int64_t i = token * scenario_.top_k + k;
      if (Value(key, 3, from, i) > 0) continue;
      sum += Value(key, 2, from, i) * Value(key, 1, from, i * columns + column);
    }
    return sum;
  }

  void VerifyGather(const CallKey& key, const Buffer& buffer) {
    int64_t shard = scenario_.shard_dim, hidden = shard * scenario_.tp;
    for (int64_t i = 0; i < Tokens(key) * hidden; ++i) {
      int64_t token = i / hidden, from = i % hidden / shard;
      double sum = Value(key, 5, from, token * shard + i % shard);
      if (scenario_.has_residual) sum += Value(key, 6, 0, i);
      CHECK(ToBf16(sum) == buffer.gathered[i],
            "%s: gathered[%ld, %ld] of rank %ld in launch %ld, site %lu, call %lu is %g, not %g",
            scenario_.name.c_str(), token, i % hidden, rank(), key.run, key.site, key.count,
            FromBf16(buffer.gathered[i]), sum);
    }
  }

  void Verify(const CallKey& key, const Buffer& buffer) {
    if (scenario_.gathers) {
      VerifyGather(key, buffer);
      return;
    }
    int64_t tokens = Tokens(key), columns = scenario_.latent_dim, shard = scenario_.shard_dim;
    for (int64_t token = 0; token < tokens; ++token) {
      std::vector<double> x(columns);
      double squares = 0;
      for (int64_t c = 0; c < columns; ++c) {
        for (int64_t from = 0; from < scenario_.tp; ++from) {
          x[c] += FromBf16(ToBf16(Contribution(key, from, token, c)));
        }
        if (!scenario_.fp32_internal) x[c] = FromBf16(ToBf16(x[c]));
        squares += scenario_.fp32_internal ? x[c] * x[c] : FromBf16(ToBf16(x[c] * x[c]));
      }
      double inverse = 1 / std::sqrt(squares / columns + 1e-6);
      for (int64_t c = 0; c < columns; ++c) {
        uint16_t expected = ToBf16(x[c] * inverse * (1 + c % 3));
        uint16_t actual = buffer.latent[token * columns + c];
        CHECK(std::abs(Ordinal(expected) - Ordinal(actual)) <= 1,
              "%s: latent[%ld, %ld] of rank %ld in launch %ld, site %lu, call %lu is %g, not %g",
              scenario_.name.c_str(), token, c, rank(), key.run, key.site, key.count,
              FromBf16(actual), FromBf16(expected));
      }
      for (int64_t c = 0; c < shard; ++c) {
        double sum = 0;
        for (int64_t from = 0; from < scenario_.tp; ++from) {
          sum += Value(key, 4, from, token * shard * scenario_.tp + rank() * shard + c);
        }
        uint16_t actual = buffer.shard[token * shard + c];
        CHECK(ToBf16(sum) == actual || (sum == 0 && actual == 0),
              "%s: shard[%ld, %ld] of rank %ld in launch %ld, site %lu, call %lu is %g, not %g",
              scenario_.name.c_str(), token, c, rank(), key.run, key.site, key.count,
              FromBf16(actual), sum);
      }
    }
  }

  Process* const process_;
  const Scenario& scenario_;
  const int64_t position_;
  std::mutex random_mutex_;
  std::mt19937_64 random_;
  std::atomic<int> open_branches_{0};
  std::atomic<bool> failed_{false};
};

void Process::Run() {
  std::vector<std::unique_ptr<Rank>> ranks;
  int positions = scenario_.groups * scenario_.tp;
  meetings_.assign(scenario_.groups, std::vector<int>(scenario_.launches * scenario_.branches, 0));
  for (int position = 0; position < positions; ++position) {
    if (position % scenario_.processes == index_) {
      ranks.push_back(std::make_unique<Rank>(this, position));
    }
  }
  local_ranks_ = running_ = static_cast<int>(ranks.size());
  auto start = std::chrono::steady_clock::now();
  for (auto& rank : ranks) {
    threads_.Push([rank = rank.get()] { rank->Launch(0); });
  }
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return running_ == 0; });
  bool faulty = scenario_.fault_launch >= 0;
  bool all_deserted = false;  // a process whose only rank deserts sees no failure
  for (int position = 0; position < positions; ++position) {
    all_deserted |= scenario_.deserter >= 0 && local_ranks_ == 1 &&
                    position % scenario_.processes == index_ &&
                    position % scenario_.tp == scenario_.deserter;
  }
  if (!faulty) {
    CHECK(failures_.empty(), "%s: %s", scenario_.name.c_str(), failures_[0].c_str());
    CHECK(!communicator_->failure(), "%s", communicator_->failure()->message.c_str());
  } else if (all_deserted) {
    // Stays until the others have waited in vain; then it hears why.
    double waited = 0;
    for (; !scenario_.leaves && !communicator_->failure(); waited += 0.01) {
      CHECK(waited < scenario_.deadline_s + 20, "%s: not told", scenario_.name.c_str());
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    if (!scenario_.leaves) {
      std::string text = communicator_->failure()->message;
      CHECK(text.find(scenario_.expect) != std::string::npos, "%s", text.c_str());
    }
  } else {
    CHECK(!failures_.empty(), "%s: no failure", scenario_.name.c_str());
    for (const std::string& text : failures_) {
      CHECK(text == failures_[0], "%s: '%s' after '%s'", scenario_.name.c_str(), text.c_str(),
            failures_[0].c_str());
      CHECK(text.find(scenario_.expect) != std::string::npos, "%s: '%s' lacks '%s'",
            scenario_.name.c_str(), text.c_str(), scenario_.expect.c_str());
    }
    double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    CHECK(seconds < scenario_.deadline_s + 20, "%s: took %g s", scenario_.name.c_str(), seconds);
    // Every later call fails at once, with the first reason.
    Buffer buffer;
    Buffers none;
    none.tokens = 1;
    std::string later;
    start = std::chrono::steady_clock::now();
    communicator_->Arrive(index_, CallKey{1000, 7, 0, 0}, none,
                          [&](const Failure* failure) { later = failure ? failure->message : ""; });
    CHECK(later == failures_[0], "%s: '%s'", scenario_.name.c_str(), later.c_str());
  }
  lock.unlock();
  // The others may still be at their last calls, which this must not disturb.
  communicator_->Close();
  CHECK(communicator_->failure(), "no failure after Close");
}

// ---------------------------------------------------------------------------------------------

struct Segment {
  explicit Segment(int64_t bytes) : bytes(bytes) {
    if (bytes == 0) return;
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED, "mmap of %ld bytes", bytes);
  }
  ~Segment() {
    if (memory) munmap(memory, bytes);
  }
  int64_t bytes;
  void* memory = nullptr;
};

std::atomic<int>* Meetings(const Segment& segment) {
  return static_cast<std::atomic<int>*>(segment.memory);
}

int64_t MeetingBytes(const Scenario& scenario) {
  return scenario.launches * scenario.branches * sizeof(std::atomic<int>);
}

void RunInThreads(const Scenario& scenario, uint64_t seed) {
  Segment segment(Communicator::SegmentBytes(Process::Configure(scenario)));
  Segment meetings(MeetingBytes(scenario));
  {
    std::vector<std::unique_ptr<Process>> processes;
    for (int index = 0; index < scenario.processes; ++index) {
      processes.push_back(
          std::make_unique<Process>(scenario, index, segment.memory, Meetings(meetings), seed));
    }
    std::vector<std::thread> threads;
    for (auto& process : processes) threads.emplace_back([&process] { process->Run(); });
    for (std::thread& thread : threads) thread.join();
    for (auto& process : processes) process->CloseAndWait();
  }
}

void RunInProcesses(const Scenario& scenario, uint64_t seed) {
  Segment segment(Communicator::SegmentBytes(Process::Configure(scenario)));
  Segment meetings(MeetingBytes(scenario));
  std::vector<pid_t> children;
  for (int index = 0; index < scenario.processes; ++index) {
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
      alarm(300);
      {
        Process process(scenario, index, segment.memory, Meetings(meetings), seed);
        process.Run();
        process.CloseAndWait();
      }
      std::fflush(nullptr);
      _exit(0);
    }
    children.push_back(child);
  }
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: a process ended with status %d",
          scenario.name.c_str(), status);
  }
}

std::vector<Scenario> Scenarios() {
  std::vector<Scenario> all;
  auto add = [&all](const char* name, auto... set) {
    Scenario scenario;
    scenario.name = name;
    (set(scenario), ...);
    all.push_back(scenario);
  };
  auto tp = [](int value) { return [=](Scenario& s) { s.tp = value; }; };
  auto groups = [](int value) { return [=](Scenario& s) { s.groups = value; }; };
  auto over = [](int value) { return [=](Scenario& s) { s.processes = value; }; };
  auto forked = [](Scenario& s) { s.fork = true; };
  auto delays = [](Scenario& s) { s.delays = true; };
  auto block = [](Scenario& s) {
    s.ranks_block = true;
    s.threads = 1;
  };
  // Threads enough that none of the ranks' first steps waits for a blocked one.
  auto block_all = [](Scenario& s) {
    s.processes_block = true;
    s.threads = s.branches * s.groups * s.tp;
  };
  auto one_thread = [](Scenario& s) { s.threads = 1; };
  auto finalize = [](Scenario& s) { s.top_k = 4; };
  auto fp32 = [](Scenario& s) { s.fp32_internal = true; };
  auto latent_only = [](Scenario& s) { s.shard_dim = 0; };
  auto shared_only = [](Scenario& s) { s.latent_dim = 0; };
  auto gather = [](Scenario& s) { s.gathers = true; };
  auto gather_add = [](Scenario& s) { s.gathers = s.has_residual = true; };
  // Wide enough that other threads help.
  auto large = [](Scenario& s) {
    s.latent_dim = 512;
    s.shard_dim = 512;
    s.max_tokens = 64;
    s.always_max_tokens = true;
    s.launches = 3;
    s.branches = 2;
    s.chain = 2;
  };
  // Far more data than two of the largest calls is open at once.
  auto crowded = [](Scenario& s) {
    s.branches = 30;
    s.chain = 2;
    s.always_max_tokens = true;
    s.launches = 4;
  };
  auto deserted = [](int rank) {
    return [=](Scenario& s) {
      s.deserter = rank;
      s.fault_launch = 3;
      s.deadline_s = 0.4;
      s.expect = "rank " + std::to_string(rank) + " (device";
    };
  };
  auto left = [](int rank) {
    return [=](Scenario& s) {
      s.deserter = rank;
      s.fault_launch = 3;
      s.leaves = true;
      s.expect = "closed its communicator";
    };
  };
  auto lied = [](int rank) {
    return [=](Scenario& s) {
      s.liar = rank;
      s.fault_launch = 2;
      s.deadline_s = 5;
      s.expect = "ranks disagree in";
    };
  };

  // Forks come first: a process with threads of ours cannot be forked into one that has them.
  add("forked 2x1", over(2), forked, delays);
  add("forked 4x1", tp(4), over(4), forked, delays);
  add("forked 8x1", tp(8), over(8), forked, one_thread);
  add("forked 2x2", tp(4), over(2), forked, block, delays);
  add("forked 2x1, processes block", over(2), forked, block_all, delays);
  add("forked 2x2, processes block", tp(4), over(2), forked, block_all, delays);
  add("forked 2x4 in two groups", tp(4), groups(2), over(2), forked, block);
  add("forked 2x1, finalize, fp32", over(2), forked, finalize, fp32);
  add("forked 4x1, crowded", tp(4), over(4), forked, crowded, delays);
  add("forked 2x2, large", tp(4), over(2), forked, large);
  add("forked 4x1, gather", tp(4), over(4), forked, gather, delays);
  add("forked 2x2, gather and add", tp(4), over(2), forked, gather_add, block_all, delays);
  add("forked 4x1, gather, crowded", tp(4), over(4), forked, gather_add, crowded, delays);
  add("forked 4x1, rank missing", tp(4), over(4), forked, deserted(2));
  add("forked 2x2, rank missing", tp(4), over(2), forked, deserted(3));
  add("forked 4x1, process leaves", tp(4), over(4), forked, left(1));
  add("forked 4x1, tokens differ", tp(4), over(4), forked, lied(1));
  add("1x1", tp(1));
  add("1x2", tp(2), delays);
  add("1x3", tp(3), finalize);
  add("1x8", tp(8), delays);
  add("1x8, blocking", tp(8), block);
  add("1x8, blocking, delays", tp(8), block, delays);
  add("1x4 in two groups", tp(2), groups(2), block, fp32);
  add("1x4, large", tp(4), large);
  add("1x4, large, finalize", tp(4), large, finalize);
  add("1x4, latent only", tp(4), latent_only);
  add("1x4, shared only", tp(4), shared_only);
  add("1x20", tp(20));
  add("1x1, gather and add", tp(1), gather_add);
  add("1x8, gather, blocking", tp(8), gather, block, delays);
  add("1x8, gather and add", tp(8), gather_add, delays);
  add("1x4, gather and add, large", tp(4), large, gather_add);
  add("1x4, rank missing", tp(4), deserted(1));
  add("1x4, tokens differ", tp(4), lied(3));
  add("2x1", over(2), delays);
  add("2x1, latent only", over(2), latent_only);
  add("2x1, shared only", over(2), shared_only);
  add("4x1", tp(4), over(4), delays);
  add("2x2, blocking", tp(4), over(2), block, delays);
  add("3x1, processes block", tp(3), over(3), block_all, delays);
  add("2x2 in groups of two", tp(2), groups(2), over(2), block, finalize);
  add("3x1, crowded", tp(3), over(3), crowded, delays);
  add("2x2, crowded", tp(4), over(2), crowded, block);
  add("2x2, large", tp(4), over(2), large);
  add("2x1, gather", over(2), gather, delays);
  add("4x1, gather and add", tp(4), over(4), gather_add, delays);
  add("2x2, gather, large", tp(4), over(2), large, gather_add);
  add("2x2 in groups of two, gather", tp(2), groups(2), over(2), gather, block);
  add("3x1, gather, crowded", tp(3), over(3), crowded, gather, delays);
  add("2x2, gather, rank missing", tp(4), over(2), gather, deserted(2));
  add("2x2, gather, tokens differ", tp(4), over(2), gather_add, lied(2));
  add("3x1, rank missing", tp(3), over(3), deserted(0));
  add("2x2, tokens differ", tp(4), over(2), lied(2));
  return all;
}

}  // namespace

int Main(int argc, char** argv) {
  uint64_t seed = 0;
  int rounds = 1;
  std::string only;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!std::strcmp(argv[i], "--seed")) seed = std::strtoull(argv[i + 1], nullptr, 10);
    if (!std::strcmp(argv[i], "--rounds")) rounds = std::atoi(argv[i + 1]);
    if (!std::strcmp(argv[i], "--only")) only = argv[i + 1];
  }
  for (bool forked : {true, false}) {
    for (int round = 0; round < rounds; ++round) {
      for (const Scenario& scenario : Scenarios()) {
#if defined(__SANITIZE_THREAD__)
        // It does not see what another process does between two threads of this one, and reports
        // races that are none. Where the "processes" are threads it sees everything.
        if (forked) continue;
#endif
        if (scenario.fork != forked || (!only.empty() && only != scenario.name)) continue;
        alarm(300);
        auto start = std::chrono::steady_clock::now();
        if (forked) {
          RunInProcesses(scenario, seed + round);
        } else {
          RunInThreads(scenario, seed + round);
        }
        double seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        std::printf("%-32s %6.2f s\n", scenario.name.c_str(), seconds);
        std::fflush(stdout);
      }
    }
  }
  std::printf("%d threads in the pool\n", Pool::Get().threads());
  return 0;
}

}  // namespace latent_tail::cpu

int main(int argc, char** argv) { return latent_tail::cpu::Main(argc, argv); }
