// Threads that complete ranks: as many as are blocked in their jobs, and one more.

#ifndef JAX_LATENT_TAIL_CPU_POOL_H_
#define JAX_LATENT_TAIL_CPU_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <vector>

namespace latent_tail::cpu {

// Cores this process may run on, which can be fewer than the machine has.
int AvailableCores();

// A queue of jobs that may block for any time: completing a rank's call continues that rank's
// program on the completing thread. While jobs are queued, some thread is on its way to take one;
// each that takes one and leaves others behind first sees to a successor. So jobs that block cost a
// thread each, and those that do not are run by as few threads as there are cores to run them.
class Pool {
 public:
  using Job = std::function<void()>;

  // The process's only pool. It is never destroyed: threads may wait in it until the process ends.
  static Pool& Get();

  // Queues jobs; takes a lock for moments only. In a forked child, which has no threads, it must not
  // be called.
  void Push(Job job);

  int threads() const { return threads_.load(std::memory_order_relaxed); }

 private:
  Pool();
  void Work();
  // Sees to it that a thread comes for the queue. Holds `lock` on entry and on return.
  void Summon(std::unique_lock<std::mutex>& lock);
  bool SpinForJob();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Job> queue_;  // ring of a power of two
  size_t head_ = 0;
  std::atomic<size_t> queued_{0};
  int searching_ = 0;   // threads awake and about to look at the queue
  int sleeping_ = 0;    // threads in `wake_` that nobody has called yet
  int called_ = 0;      // wake-ups under way; those threads count as searching already
  std::atomic<int> threads_{0};
  const int spins_;
};

}  // namespace latent_tail::cpu

#endif  // JAX_LATENT_TAIL_CPU_POOL_H_
