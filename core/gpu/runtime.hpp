// SPDX-License-Identifier: Apache-2.0
//
// A GPU's runtime behind one interface: CUDA's driver API (cuda.hpp) and HIP's (hip.hpp), found when the program runs.
// It says what memory an address belongs to, exports memory as a DMA-BUF, and enqueues on streams. It knows nothing of
// devices, registrations or requests.
//
// Calls that may fail at set-up throw Failure. Those that a request makes return the runtime's own code, 0 for success,
// which `words` explains. All of it is thread-safe, and works from threads that have no current context.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/descriptor.hpp"

namespace ugds::gpu {

/// An address that the GPU uses. Runtimes give the processor's addresses and the GPUs' one space.
using Address = std::uint64_t;

/// CUstream or hipStream_t. nullptr is the default stream of the place's context.
using StreamHandle = void*;

enum class Backend : std::uint8_t { cuda, hip };

/// Which GPU, and the context in which it is driven: its primary one, or that of the memory.
struct Place {
  int device = -1;
  void* context = nullptr;
  bool operator==(const Place&) const = default;
};

/// The runtime's allocation that an address lies in.
struct Allocation {
  Address base = 0;
  std::uint64_t size = 0;
  std::uint64_t id = 0;  ///< never used again while the process lives; 0: the runtime has no number for such memory
  Place place{};
};

/// What a stream does with a word of memory.
struct WordOp {
  enum class Kind : std::uint8_t {
    write,  ///< stores `value`; everything before it on the stream happened before
    wait,   ///< goes on once the word is at or after `value`, as numbers that wrap
  };
  Kind kind = Kind::write;
  Address word = 0;
  std::uint64_t value = 0;
};

/// What the copy kernel reads when it runs. In pinned memory, all of it written before the stream gets there.
struct CopyOrder {
  Address source = 0;
  Address destination = 0;
  std::uint64_t bytes = 0;
};

/// What one launch of the kernel of pieces does. It tells that the stream has come, at `reached_at` + 1. Then, piece by
/// piece, it waits until `allowed` is one further than at the piece before (at first: than `allowed_at`), copies the
/// piece, and tells that `reached` is one further. On one side the pieces go round in an area, of pinned memory.
/// Without any bytes the stream is held, and no more. Where `allowed` is kGivenUp further, it ends.
struct Pieces {
  enum Tell : std::uint64_t { nothing = 0, arrival = 1, copied = 2 };
  static constexpr std::uint64_t kGivenUp = std::uint64_t{1} << 33;
  Address reached = 0;
  std::uint64_t reached_at = 0;
  Address allowed = 0;
  std::uint64_t allowed_at = 0;
  Address order = 0;  ///< of a CopyOrder, read after the first wait, in place of `copy`; 0: there is none
  CopyOrder copy{};   ///< both sides aligned to 16 bytes, if it is to be fast
  std::uint64_t piece = 0, area = 0;  ///< bytes: of each piece but the last, and a multiple of it
  std::uint64_t count = 1;            ///< of pieces
  std::uint64_t most = 0;             ///< bytes of a piece, at most
  std::uint64_t tell = nothing;
  bool gathers = false;  ///< the area is the destination; else it is the source
  /// Of several, at most kMostBlocks and `count`, each copies every so many-th piece, and tells its own number of them
  /// in a word of its own: the first one's is `reached`, and they lie one behind the other.
  std::uint32_t blocks = 1;
  static constexpr std::uint32_t kMostBlocks = 8;
};

/// A word that the processor and streams share. `host` is where the processor finds it.
struct Word {
  std::atomic<std::uint64_t>* host = nullptr;
  Address device = 0;
};

class Runtime {
 public:
  virtual ~Runtime() = default;
  virtual Backend backend() const = 0;
  /// "cuda" or "hip".
  virtual const char* name() const = 0;
  /// The driver in words, such as "CUDA driver 13.0".
  virtual std::string driver() const = 0;
  /// The GPUs that may be used (UGDS_GPUS names some; the default is all).
  virtual int device_count() const = 0;
  virtual std::string device_name(int device) const = 0;
  /// A code of this runtime in words, such as "CUDA_ERROR_INVALID_VALUE (1): invalid argument".
  virtual std::string words(int code) const = 0;

  // --- Memory
  // ----------------------------------------------------------------------------------------------------------

  /// The allocation that holds `address`, or none where that is not GPU memory of this runtime (host memory, even
  /// pinned by it, is none). Throws Failure(EOPNOTSUPP) for managed memory, which has no fixed place.
  virtual std::optional<Allocation> find(Address address) = 0;
  /// Whether `allocation` is still there: false where it was freed, also where another lies there now.
  virtual bool is_alive(const Allocation& allocation, Address address) noexcept = 0;
  /// A DMA-BUF of [address, address + size), both multiples of 64 KiB or reaching to the allocation's ends. `pcie`:
  /// with the mapping that goes over PCIe. Throws Failure(EOPNOTSUPP) with the code and its words in the cause.
  virtual Descriptor export_dmabuf(const Place& place, Address address, std::uint64_t size, bool pcie) = 0;

  /// Lets streams copy from and to memory of this process at full speed, and kernels reach it. Returns the address that
  /// kernels use. Throws Failure.
  virtual Address pin(void* address, std::uint64_t size) = 0;
  virtual void unpin(void* address) noexcept = 0;

  /// A word for `enqueue_words`, 0 at first, on a cache line of its own, which is its user's. Throws Failure.
  virtual Word make_word() = 0;
  virtual void free_word(const Word& word) noexcept = 0;

  // --- Streams: set-up
  // -------------------------------------------------------------------------------------------------

  /// The place of a device by number: its primary context. Throws Failure(ENODEV).
  virtual Place place_of(int device) = 0;
  /// The place of a stream; `otherwise` where the runtime does not tell, as of the default stream.
  virtual Place place_of_stream(StreamHandle, const Place& otherwise) { return otherwise; }
  /// A stream of ours, which does not wait for the legacy default stream. Throws Failure.
  virtual StreamHandle make_stream(const Place& place) = 0;
  virtual void destroy_stream(const Place& place, StreamHandle stream) noexcept = 0;
  /// Whether streams of the device can write words and wait for them.
  virtual bool has_words(int device) = 0;
  /// How many streams of the device may wait for words before others' work waits behind them.
  virtual int connections(int device) = 0;
  /// Loads the kernels of `enqueue_copies` and `enqueue_pieces`. Throws Failure(EOPNOTSUPP) where there are none.
  virtual void load_kernels(const Place& place) = 0;
  /// Whether what a device wrote to GPU memory is there for what follows a kernel that saw the word, as it is after a
  /// wait for the word.
  virtual bool kernels_see_devices(int device) = 0;

  // --- Streams: what a request enqueues. The runtime's code, 0 for success.
  // ---------------------------------------------

  /// Calls `body(context)`, in which calls of the place are cheaper, since each of them has to be in its context.
  virtual void within(const Place&, void (*body)(void*), void* context) { body(context); }
  virtual int enqueue_words(const Place& place, StreamHandle stream, std::span<const WordOp> ops) noexcept = 0;
  /// `to` or `from` is pinned memory of this process.
  virtual int enqueue_to_device(const Place& place, StreamHandle stream, Address to, const void* from,
                                std::uint64_t bytes) noexcept = 0;
  virtual int enqueue_from_device(const Place& place, StreamHandle stream, void* to, Address from,
                                  std::uint64_t bytes) noexcept = 0;
  /// Copies as the `count` CopyOrders at `orders`, the address that `pin` gave of them, say when the stream gets there.
  /// None of them is of more than `most` bytes.
  virtual int enqueue_copies(const Place& place, StreamHandle stream, Address orders, std::uint32_t count,
                             std::uint64_t most) noexcept = 0;
  /// Holds the stream, and copies, by one launch.
  virtual int enqueue_pieces(const Place& place, StreamHandle stream, const Pieces& pieces) noexcept = 0;
  /// Calls `function(context)` in the runtime's thread for that, which must call nothing of the runtime.
  virtual int enqueue_call(const Place& place, StreamHandle stream, void (*function)(void*),
                           void* context) noexcept = 0;
  /// Whether the stream is being captured into a graph, or could be by being touched (a legacy stream beside a
  /// capture).
  virtual int is_capturing(const Place& place, StreamHandle stream, bool& capturing) noexcept = 0;
  /// Whether all that was enqueued on the stream has ended, and all that it would wait for. False where that is not
  /// known.
  virtual bool is_idle(const Place& place, StreamHandle stream) noexcept = 0;
  /// Whether all that was enqueued on the stream has ended, as `ended`; the code says whether it can.
  virtual int poll(const Place& place, StreamHandle stream, bool& ended) noexcept = 0;
  /// Waits until all that was enqueued is done.
  virtual int synchronize(const Place& place, StreamHandle stream) noexcept = 0;
  /// Copies in the calling thread, to or from any memory of this process, and returns when it is done. With a stream of
  /// this library's: no other stream is waited for.
  virtual int copy_to_device(const Place& place, Address to, const void* from, std::uint64_t bytes) noexcept = 0;
  virtual int copy_from_device(const Place& place, void* to, Address from, std::uint64_t bytes) noexcept = 0;
};

/// CUDA's or HIP's, or nullptr where its library, driver or GPU is missing, and then `why` says which. Tried once in a
/// process: a later call gives the same. Thread-safe.
Runtime* cuda(std::string* why = nullptr);
Runtime* hip(std::string* why = nullptr);

/// The runtime whose memory `address` is, with the allocation; nullptr where it is no GPU's. Asks those runtimes alone
/// that the process has loaded already, or that UGDS_CUDA_LIBRARY or UGDS_HIP_LIBRARY name: nobody else could have
/// allocated it. Throws as Runtime::find.
Runtime* owner_of(const void* address, Allocation& allocation);

}  // namespace ugds::gpu
