#include "cpu_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <system_error>
#include <thread>
#include <utility>

#include "cpu_wait.h"

namespace latent_tail::cpu {

int AvailableCores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return CPU_COUNT(&cores);
}

Pool& Pool::Get() {
  static Pool* pool = new Pool;
  return *pool;
}

Pool::Pool() : queue_(64), spins_(AvailableCores() > 1 ? kSpins : 0) {}

void Pool::Push(Job job) {
  std::unique_lock<std::mutex> lock(mutex_);
  size_t queued = queued_.load(std::memory_order_relaxed);
  if (queued == queue_.size()) {
    std::vector<Job> larger(2 * queue_.size());
    for (size_t i = 0; i < queued; ++i) {
      larger[i] = std::move(queue_[(head_ + i) & (queue_.size() - 1)]);
    }
    queue_ = std::move(larger);
    head_ = 0;
  }
  queue_[(head_ + queued) & (queue_.size() - 1)] = std::move(job);
  queued_.store(queued + 1, std::memory_order_release);
  if (searching_ == 0) Summon(lock);
}

void Pool::Summon(std::unique_lock<std::mutex>& lock) {
  ++searching_;
  if (sleeping_ > 0) {
    --sleeping_;
    ++called_;
    lock.unlock();
    wake_.notify_one();
    lock.lock();
    return;
  }
  lock.unlock();
  bool started = true;
  // The thread takes no signals: they are the interpreter's.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    std::thread([this] { Work(); }).detach();
  } catch (const std::system_error&) {
    started = false;  // those that run will come for the job
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  lock.lock();
  if (started) {
    threads_.fetch_add(1, std::memory_order_relaxed);
  } else {
    --searching_;
  }
}

void Pool::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    size_t queued = queued_.load(std::memory_order_relaxed);
    if (queued > 0) {
      Job job = std::move(queue_[head_]);
      queue_[head_] = nullptr;
      head_ = (head_ + 1) & (queue_.size() - 1);
      queued_.store(queued - 1, std::memory_order_relaxed);
      --searching_;
      if (queued > 1 && searching_ == 0) Summon(lock);
      lock.unlock();
      job();
      job = nullptr;
      lock.lock();
      ++searching_;
      continue;
    }
    if (searching_ == 1 && spins_ > 0) {
      lock.unlock();
      bool found = SpinForJob();
      lock.lock();
      if (found || queued_.load(std::memory_order_relaxed) > 0) continue;
    }
    --searching_;
    ++sleeping_;
    while (called_ == 0) wake_.wait(lock);
    --called_;
  }
}

bool Pool::SpinForJob() {
  for (int spin = 0; spin < spins_; ++spin) {
    if (queued_.load(std::memory_order_acquire) > 0) return true;
    SpinPause(spin);
  }
  return false;
}

}  // namespace latent_tail::cpu
