// SPDX-License-Identifier: Apache-2.0
//
// AMD's GPUs through the HIP runtime. What differs from CUDA:
// - A device is current in a thread instead of a context. Every call sets it and restores the caller's, as it does with
//   the thread's last error, which programs look at after their own launches. Place::context is unused.
// - Streams wait on signal memory alone, 8 bytes an allocation, and compare as plain numbers, which do not wrap.
// - HSA exports the DMA-BUF of the whole that memory lies in, and says where in it.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gpu/hip_api.hpp"
#include "gpu/runtime.hpp"

namespace ugds::gpu {

class HipRuntime final : public Runtime {
 public:
  /// A DMA-BUF in which the memory that was asked for begins at `offset`.
  struct Export {
    Descriptor descriptor;
    std::uint64_t offset = 0;
  };

  /// nullptr where the library, its version, a GPU, or what UGDS_GPUS names is not as it must be, and then `why` says
  /// so. `hip` is the process's one; another shares its streams, memory and devices.
  static std::unique_ptr<HipRuntime> open(std::string& why);
  ~HipRuntime() override;
  HipRuntime(const HipRuntime&) = delete;
  HipRuntime& operator=(const HipRuntime&) = delete;

  Backend backend() const override { return Backend::hip; }
  const char* name() const override { return "hip"; }
  std::string driver() const override;
  /// How many; their numbers are HIP's own, so with UGDS_GPUS=2 there is one, number 2.
  int device_count() const override { return static_cast<int>(devices_.size()); }
  /// Throws Failure(ENODEV) for a number that is none of them.
  std::string device_name(int device) const override;
  std::string words(int code) const override;

  /// Throws Failure(ENODEV) too, for memory of a GPU that UGDS_GPUS leaves out.
  std::optional<Allocation> find(Address address) override;
  bool is_alive(const Allocation& allocation, Address address) noexcept override;
  /// As `export_range`, and also refuses where the DMA-BUF does not begin with the memory.
  Descriptor export_dmabuf(const Place& place, Address address, std::uint64_t size, bool pcie) override;
  /// Throws Failure(EOPNOTSUPP) where the runtime refuses, or where the memory left the GPU for it.
  Export export_range(const Place& place, Address address, std::uint64_t size, bool pcie);

  Address pin(void* address, std::uint64_t size) override;
  /// Waits until all streams of the GPU are done: not to be called while one waits for a word.
  void unpin(void* address) noexcept override;
  Word make_word() override;
  /// Keeps it for the next that is made; no stream is waited for.
  void free_word(const Word& word) noexcept override;

  Place place_of(int device) override;
  StreamHandle make_stream(const Place& place) override;
  void destroy_stream(const Place& place, StreamHandle stream) noexcept override;
  bool has_words(int device) override;
  int connections(int device) override;
  /// Always throws: no kernel is there for AMD's GPUs.
  void load_kernels(const Place& place) override;
  bool kernels_see_devices(int) override { return false; }

  /// One after another, since there is no batch of them: where one fails, those before it are enqueued. A value from
  /// 2^63 on is refused.
  int enqueue_words(const Place& place, StreamHandle stream, std::span<const WordOp> ops) noexcept override;
  int enqueue_to_device(const Place& place, StreamHandle stream, Address to, const void* from,
                        std::uint64_t bytes) noexcept override;
  int enqueue_from_device(const Place& place, StreamHandle stream, void* to, Address from,
                          std::uint64_t bytes) noexcept override;
  /// Always hipErrorNotSupported.
  int enqueue_copies(const Place& place, StreamHandle stream, Address orders, std::uint32_t count,
                     std::uint64_t most) noexcept override;
  bool is_idle(const Place&, StreamHandle) noexcept override { return false; }
  int poll(const Place&, StreamHandle, bool& ended) noexcept override {
    ended = false;
    return 0;
  }
  int enqueue_pieces(const Place&, StreamHandle, const Pieces&) noexcept override { return hip_api::kNotSupported; }
  int enqueue_call(const Place& place, StreamHandle stream, void (*function)(void*), void* context) noexcept override;
  int is_capturing(const Place& place, StreamHandle stream, bool& capturing) noexcept override;
  int synchronize(const Place& place, StreamHandle stream) noexcept override;
  int copy_to_device(const Place& place, Address to, const void* from, std::uint64_t bytes) noexcept override;
  int copy_from_device(const Place& place, void* to, Address from, std::uint64_t bytes) noexcept override;

 private:
  class Scope;
  /// Streams of ours on which nothing runs, for copies in the calling thread.
  struct IdleStreams {
    std::mutex lock;
    std::array<StreamHandle, 8> streams{};
  };

  HipRuntime() = default;
  bool choose_devices(std::string& why);
  bool is_usable(int device) const;
  [[noreturn]] void refuse(int code, const char* operation, const char* function, const std::string& hint = "") const;
  [[noreturn]] void refuse_export(const std::string& cause) const;
  int call_export(Address address, std::uint64_t size, bool pcie, int& number, std::uint64_t& offset,
                  std::string& words) const;
  int call_range_export(Address address, std::uint64_t size, bool pcie, int& number, std::string& words) const;
  std::uint64_t owner_of(Address address) const noexcept;
  std::string why_not_on(const Place& place, Address address, std::uint64_t owner) const;
  Word allocate_word();
  StreamHandle take_stream(int device, int& code) noexcept;
  void give_stream(int device, StreamHandle stream) noexcept;
  template <class Enqueue>
  int copy_now(const Place& place, Enqueue enqueue) noexcept;

  hip_api::Api api_{};
  int version_ = 0;
  std::vector<int> devices_;                          ///< that may be used, ascending
  std::vector<std::unique_ptr<IdleStreams>> idle_{};  ///< by number
  std::mutex words_lock_;
  std::vector<Word> spare_words_;
  std::size_t words_ = 0;  ///< that were allocated
};

}  // namespace ugds::gpu
