// SPDX-License-Identifier: Apache-2.0
//
// The thread of a handle that does the I/O of streams: it sees which of them have come to a request, gives that to the
// device through a batch, and lets the stream go on. It asks the GPU's runtime for nothing. It sleeps while nothing is
// pending, and looks for streams to arrive less and less often while there is only that to do.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <thread>

#include "engine/batch.hpp"
#include "engine/stream.hpp"
#include "memory/ledger.hpp"

namespace ugds::engine {

class StreamWorker {
 public:
  static constexpr std::uint32_t kMostStreams = 1024;
  /// Requests that it has at the device at once.
  static constexpr std::uint32_t kInFlight = 4096;

  /// Starts the thread. Throws Failure.
  explicit StreamWorker(Handle& handle);
  /// Lets every stream through whose requests of the handle are pending, with an error, and ends the thread.
  ~StreamWorker();
  StreamWorker(const StreamWorker&) = delete;
  StreamWorker& operator=(const StreamWorker&) = delete;

  /// Operations that were submitted and have not ended.
  std::uint64_t pending() const { return pending_.load(std::memory_order_acquire); }
  Handle& handle() const { return handle_; }
  memory::Ledger& ledger() { return ledger_; }
  Stream::Counters& counters() { return counters_; }

  /// For a submission: makes the stream known. Throws Failure(EMFILE).
  void join(Stream& stream);
  void count_in() { pending_.fetch_add(1, std::memory_order_seq_cst); }
  void wake();

 private:
  friend class Stream;
  void run();
  bool attend(Stream& stream);
  bool begin(Stream& stream, StreamOp& op);
  std::uint64_t placed(const Late& values, std::uint64_t offset, std::uint64_t size) const;
  void bind(Stream& stream, StreamOp& op);
  void explain(Stream& stream, StreamOp& op);
  void write_orders(Stream& stream, StreamOp& op);
  bool give(Stream& stream, StreamOp& op, std::uint64_t reached);
  bool give_piece(Stream& stream, StreamOp& op);
  bool give_parts(Stream& stream, StreamOp& op);
  bool submit(const Transfer& transfer, StreamOp& op, std::uint32_t piece);
  bool progress(Stream& stream, StreamOp& op);
  bool is_enqueued(StreamOp& op);
  std::uint64_t right_bytes(Stream& stream, const StreamOp& op);
  void poison(Stream& stream, StreamOp& op, std::uint32_t piece);
  bool poison_direct(Stream& stream, StreamOp& op);
  void tell_poison(const StreamOp& op, bool marked);
  void fail(StreamOp& op, const Error& error);
  void take(const Done& done);
  void complete(Stream& stream, StreamOp& op);
  void rest();
  void let_all_through();

  Handle& handle_;
  memory::Ledger ledger_;
  Stream::Counters counters_;
  BatchId batch_id_;
  Batch* batch_ = nullptr;
  std::uint64_t flying_ = 0;  ///< requests at the device
  std::array<std::atomic<Stream*>, kMostStreams> streams_{};
  std::atomic<std::uint32_t> stream_count_{0};
  std::mutex streams_lock_;
  std::atomic<std::uint64_t> pending_{0};
  std::atomic<std::uint32_t> asleep_{0};
  std::atomic<bool> quit_{false};
  Idle idle_;
  std::uint64_t resting_since_ = 0;
  std::thread thread_;
};

}  // namespace ugds::engine
