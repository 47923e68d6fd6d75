#include "cpu_site.h"

#include <atomic>
#include <cstring>
#include <unordered_map>

namespace latent_tail::cpu {
namespace {

std::atomic<uint64_t> num_sites{0};
std::atomic<uint64_t> num_series{0};

// How often each module was lowered. Never destroyed: threads may compile until the process ends.
struct Lowerings {
  std::mutex mutex;
  std::unordered_map<int64_t, uint64_t> counts;

  static Lowerings& Get() {
    static Lowerings* lowerings = new Lowerings;
    return *lowerings;
  }
};

// The series of the executable that this thread is compiling, as far as one can tell.
std::shared_ptr<Series>& OpenSeries() {
  thread_local std::shared_ptr<Series> series;
  return series;
}

uint64_t Mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 29);
}

uint64_t Content(const Attributes& attributes) {
  const Spec& spec = attributes.spec;
  uint32_t eps;
  std::memcpy(&eps, &spec.eps, sizeof(eps));
  uint64_t hash = Mix(eps, spec.fp32_internal);
  hash = Mix(Mix(hash, spec.gathers), spec.has_residual);
  for (int64_t value : {spec.tp, spec.latent_dim, spec.hidden_dim, spec.top_k, spec.max_tokens}) {
    hash = Mix(hash, static_cast<uint64_t>(value));
  }
  for (int64_t device : attributes.devices) hash = Mix(hash, static_cast<uint64_t>(device));
  return hash;
}

}  // namespace

Series::Series(int64_t module, uint64_t lowering)
    : number_(num_series.fetch_add(1)),
      module_(module),
      lowering_(lowering),
      hash_(static_cast<uint64_t>(module)) {}

int64_t Series::FirstRun(int64_t run) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!first_run_) first_run_ = run;
  return *first_run_;
}

int64_t Series::Add(uint64_t content) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_named_) return -1;
  hash_ = Mix(hash_, content);
  return size_++;
}

uint64_t Series::Name() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_named_ = true;
  return Mix(hash_, static_cast<uint64_t>(size_));
}

ffi::TypeId CallSite::id = {};

CallSite::CallSite(int64_t module, const Attributes& attributes)
    : number_(num_sites.fetch_add(1)), visits_(attributes.devices.size()) {
  std::shared_ptr<Series>& open = OpenSeries();
  uint64_t content = Content(attributes);
  uint64_t lowering;
  {
    Lowerings& lowerings = Lowerings::Get();
    std::lock_guard<std::mutex> lock(lowerings.mutex);
    lowering = lowerings.counts[module];
  }
  index_ = open && open->IsOf(module, lowering) ? open->Add(content) : -1;
  if (index_ < 0) {  // another module, or the last executable of this one runs already
    open = std::make_shared<Series>(module, lowering);
    index_ = open->Add(content);
  }
  series_ = open;
}

CallKey CallSite::Visit(int64_t position, int64_t run, bool across_processes) {
  CallKey key;
  key.run = run;
  key.program = across_processes ? series_->Name() : 0;
  key.site = across_processes ? static_cast<uint64_t>(index_) : number_;
  std::lock_guard<std::mutex> lock(mutex_);
  Visits& visits = visits_[position];
  if (visits.run != run) visits = {run, 0};
  key.count = visits.count++;
  return key;
}

void CallSite::EndSeries(int64_t module) {
  Lowerings& lowerings = Lowerings::Get();
  std::lock_guard<std::mutex> lock(lowerings.mutex);
  ++lowerings.counts[module];
}

}  // namespace latent_tail::cpu
