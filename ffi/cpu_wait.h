// Waiting for a word to change: a short spin, then the kernel.

#ifndef JAX_LATENT_TAIL_CPU_WAIT_H_
#define JAX_LATENT_TAIL_CPU_WAIT_H_

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace latent_tail::cpu {

// Looks at a word before sleeping on it, some 20 to 50 us: a sleeping thread costs its waker more.
constexpr int kSpins = 2000;

inline void SpinPause(int spin) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
  // Whoever else wants this core goes first.
  if (spin % 64 == 63) sched_yield();
}

// Words that processes share; not FUTEX_PRIVATE. Both may be called for any word at any time.
inline void FutexWait(std::atomic<uint32_t>& word, uint32_t seen, int64_t timeout_ns) {
  timespec timeout = {static_cast<time_t>(timeout_ns / 1'000'000'000),
                      static_cast<long>(timeout_ns % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

inline void FutexWake(std::atomic<uint32_t>& word, int waiters) {
  syscall(SYS_futex, &word, FUTEX_WAKE, waiters, nullptr, nullptr, 0);
}

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace latent_tail::cpu

#endif  // JAX_LATENT_TAIL_CPU_WAIT_H_
