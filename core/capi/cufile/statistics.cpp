// SPDX-License-Identifier: Apache-2.0
#include "capi/cufile/statistics.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/clock.hpp"
#include "base/immortal.hpp"
#include "capi/cufile/gpus.hpp"

namespace ugds::cufile {

namespace {

constinit Immortal<Statistics> the_statistics;

std::uint64_t get(const std::atomic<std::uint64_t>& counter) { return counter.load(std::memory_order_relaxed); }
void add(std::atomic<std::uint64_t>& counter, std::uint64_t by) { counter.fetch_add(by, std::memory_order_relaxed); }
void clear(std::atomic<std::uint64_t>& counter) { counter.store(0, std::memory_order_relaxed); }

std::uint64_t per_second(std::uint64_t count, std::uint64_t nanoseconds) {
  if (nanoseconds == 0) return 0;
  return static_cast<std::uint64_t>(static_cast<double>(count) * 1e9 / static_cast<double>(nanoseconds));
}

/// The first is of less than 1 KiB, and each one's sizes are twice those of the one before.
std::size_t size_class(std::uint64_t bytes) {
  return std::min<std::size_t>(static_cast<std::size_t>(std::bit_width(bytes >> 10)), 31);
}

}  // namespace

Statistics& statistics() { return the_statistics.value; }

void Statistics::start() {
  began_.store(monotonic_ns());
  running_.store(true);
}

void Statistics::stop() {
  if (running_.exchange(false)) stopped_after_.store(monotonic_ns() - began_.load());
}

void Statistics::reset() {
  for (Pair& pair : operations_) clear(pair.ok), clear(pair.err);
  for (Direction& d : directions_) {
    for (Counter* c : {&d.operations.ok, &d.operations.err, &d.bytes, &d.nanoseconds, &d.batch_bytes, &d.last_batch})
      clear(*c);
    for (Counter& c : d.sizes) clear(c);
  }
  clear(submit_ns_), clear(complete_ns_);
  for (Gpu& gpu : gpus_) {
    for (Gpu::Way& w : gpu.ways) {
      for (Counter* c : {&w.bytes, &w.nanoseconds, &w.total, &w.direct, &w.staged, &w.unaligned, &w.errors}) clear(*c);
    }
    for (Counter* c : {&gpu.registrations, &gpu.registered, &gpu.refused, &gpu.freed, &gpu.bytes}) clear(*c);
  }
  began_.store(monotonic_ns());
  stopped_after_.store(0);
}

void Statistics::begin(int level) {
  if (level == 0) return;  // as the program set it
  set_level(level);
  start();
}

void Statistics::end() { stop(); }

std::uint64_t Statistics::elapsed() const { return running() ? monotonic_ns() - get(began_) : get(stopped_after_); }

void Statistics::count(Operation operation, bool ok, std::uint64_t by) {
  if (!running()) return;
  Pair& pair = operations_[static_cast<std::size_t>(operation)];
  add(ok ? pair.ok : pair.err, by);
}

void Statistics::count(const Request& request) {
  if (!running()) return;
  Direction& d = directions_[request.write ? 1 : 0];
  const bool ok = request.moved >= 0;
  const std::uint64_t bytes = ok ? static_cast<std::uint64_t>(request.moved) : 0;
  if (request.batch) {
    add(d.batch_bytes, bytes);
  } else {
    add(ok ? d.operations.ok : d.operations.err, 1);
    add(d.bytes, bytes);
    add(d.nanoseconds, request.nanoseconds);
  }
  if (level() >= 2 && ok) add(d.sizes[size_class(bytes)], 1);
  if (level() < 3 || request.gpu < 0 || request.gpu >= CUFILE_STATS_GPUS) return;
  Gpu::Way& way = gpus_[static_cast<std::size_t>(request.gpu)].ways[request.write ? 1 : 0];
  add(way.total, 1);
  add(way.bytes, bytes);
  add(way.nanoseconds, request.nanoseconds);
  add(request.staged ? way.staged : way.direct, 1);
  if (request.unaligned) add(way.unaligned, 1);
  if (!ok) add(way.errors, 1);
}

void Statistics::count_batch(bool submit, std::uint64_t nanoseconds) {
  if (running()) add(submit ? submit_ns_ : complete_ns_, nanoseconds);
}

void Statistics::set_last_batch(std::uint64_t read, std::uint64_t written) {
  if (!running()) return;
  directions_[0].last_batch.store(read, std::memory_order_relaxed);
  directions_[1].last_batch.store(written, std::memory_order_relaxed);
}

void Statistics::count_buffer(int gpu, bool registered, bool ok, std::uint64_t bytes) {
  if (!running() || level() < 3 || gpu < 0 || gpu >= CUFILE_STATS_GPUS) return;
  Gpu& of = gpus_[static_cast<std::size_t>(gpu)];
  if (!registered) {
    add(of.freed, 1);
    return;
  }
  add(of.registrations, 1);
  add(ok ? of.registered : of.refused, 1);
  if (ok) add(of.bytes, bytes);
}

void Statistics::fill(CUfileStatsLevel1_t& s) const {
  s = {};
  const std::uint64_t time = elapsed();
  const auto pair = [](const Pair& p) { return CUfileOpCounter_t{get(p.ok), get(p.err)}; };
  const auto of = [&](Operation operation) { return pair(operations_[static_cast<std::size_t>(operation)]); };
  const auto average = [](std::uint64_t ns, const CUfileOpCounter_t& c) {
    return c.ok + c.err == 0 ? 0 : ns / 1000 / (c.ok + c.err);
  };
  const Direction &reads = directions_[0], &writes = directions_[1];
  s.read_ops = pair(reads.operations);
  s.write_ops = pair(writes.operations);
  s.hdl_register_ops = of(Operation::handle_register);
  s.hdl_deregister_ops = of(Operation::handle_deregister);
  s.buf_register_ops = of(Operation::buffer_register);
  s.buf_deregister_ops = of(Operation::buffer_deregister);
  s.read_bytes = get(reads.bytes);
  s.write_bytes = get(writes.bytes);
  s.read_bw_bytes_per_sec = per_second(s.read_bytes, time);
  s.write_bw_bytes_per_sec = per_second(s.write_bytes, time);
  s.read_lat_sum_us = get(reads.nanoseconds) / 1000;
  s.write_lat_sum_us = get(writes.nanoseconds) / 1000;
  s.read_lat_avg_us = average(get(reads.nanoseconds), s.read_ops);
  s.write_lat_avg_us = average(get(writes.nanoseconds), s.write_ops);
  s.read_ops_per_sec = per_second(s.read_ops.ok, time);
  s.write_ops_per_sec = per_second(s.write_ops.ok, time);
  s.batch_setup_ops = of(Operation::batch_set_up);
  s.batch_submit_ops = s.batch_total_submit_ops = s.batch_iouring_submit_ops = of(Operation::batch_submit);
  s.batch_cancel_ops = of(Operation::batch_cancel);
  s.batch_destroy_ops = of(Operation::batch_destroy);
  s.batch_complete_ops = of(Operation::batch_complete);
  s.batch_enqueued_ops = of(Operation::batch_enqueue);
  s.batch_processed_ops = of(Operation::batch_process);
  s.batch_read_bytes = get(reads.batch_bytes);
  s.batch_write_bytes = get(writes.batch_bytes);
  s.batch_read_bw_bytes = per_second(s.batch_read_bytes, time);
  s.batch_write_bw_bytes = per_second(s.batch_write_bytes, time);
  s.batch_submit_lat_sum_us = get(submit_ns_) / 1000;
  s.batch_completion_lat_sum_us = get(complete_ns_) / 1000;
  s.batch_submit_lat_avg_us = average(get(submit_ns_), s.batch_submit_ops);
  s.batch_completion_lat_avg_us = average(get(complete_ns_), s.batch_processed_ops);
  s.batch_submit_ops_per_sec = per_second(s.batch_submit_ops.ok, time);
  s.batch_complete_ops_per_sec = per_second(s.batch_complete_ops.ok, time);
  s.last_batch_read_bytes = get(reads.last_batch);
  s.last_batch_write_bytes = get(writes.last_batch);
}

void Statistics::fill(CUfileStatsLevel2_t& s) const {
  fill(s.basic);
  for (std::size_t i = 0; i < 32; ++i) {
    s.read_size_kb_hist[i] = get(directions_[0].sizes[i]);
    s.write_size_kb_hist[i] = get(directions_[1].sizes[i]);
  }
}

void Statistics::fill(CUfileStatsLevel3_t& s) const {
  fill(s.detailed);
  const std::uint64_t time = elapsed();
  const auto used = [&](std::uint64_t ns) {
    return time == 0
               ? 0
               : std::min<std::uint64_t>(
                     100, static_cast<std::uint64_t>(100.0 * static_cast<double>(ns) / static_cast<double>(time)));
  };
  s.num_gpus = static_cast<std::uint32_t>(std::min<int>(gpu_count(), CUFILE_STATS_GPUS));
  for (std::size_t i = 0; i < CUFILE_STATS_GPUS; ++i) {
    CUfilePerGpuStats_t& to = s.per_gpu_stats[i] = {};
    if (i >= s.num_gpus) continue;
    const Gpu& gpu = gpus_[i];
    const Gpu::Way &r = gpu.ways[0], &w = gpu.ways[1];
    gpu_uuid(static_cast<int>(i), to.uuid);
    to.read_bytes = get(r.bytes);
    to.read_bw_bytes_per_sec = per_second(to.read_bytes, time);
    to.read_utilization = used(get(r.nanoseconds));
    to.read_duration_us = get(r.nanoseconds) / 1000;
    to.n_total_reads = get(r.total);
    to.n_p2p_reads = get(r.direct);
    to.n_posix_reads = get(r.staged);
    to.n_unaligned_reads = get(r.unaligned);
    to.n_reads_err = get(r.errors);
    to.writes_bytes = get(w.bytes);
    to.write_bw_bytes_per_sec = per_second(to.writes_bytes, time);
    to.write_utilization = used(get(w.nanoseconds));
    to.write_duration_us = get(w.nanoseconds) / 1000;
    to.n_total_writes = get(w.total);
    to.n_p2p_writes = get(w.direct);
    to.n_posix_writes = get(w.staged);
    to.n_unaligned_writes = get(w.unaligned);
    to.n_writes_err = get(w.errors);
    to.n_mmap = get(gpu.registrations);
    to.n_mmap_ok = get(gpu.registered);
    to.n_mmap_err = get(gpu.refused);
    to.n_mmap_free = get(gpu.freed);
    to.reg_bytes = get(gpu.bytes);
  }
}

}  // namespace ugds::cufile
