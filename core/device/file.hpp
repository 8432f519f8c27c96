// SPDX-License-Identifier: Apache-2.0
//
// The transport of files: a small controller in this process whose medium is the kernel's file I/O (file/). It takes
// queue pairs' commands as a device does, so that a request on a file is staged, timed, held and told of like any
// other; bytewise.hpp says where it differs. It has no thread: a submission doorbell hands commands to the kernel,
// `turn` fetches its answers, and its interrupts are the kernel's own writes to an eventfd.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/text.hpp"
#include "device/device.hpp"
#include "file/file.hpp"
#include "file/queue.hpp"
#include "nvme/entries.hpp"

namespace ugds::device {

class FileDevice final : public Device {
 public:
  /// `file:PATH`, `file:?fd=N`, a path, or `file:?pool=1` for files that are attached. Throws Failure: EINVAL
  /// (parameters), and what File and the kernel say.
  FileDevice(std::string text, const Uri& uri);
  ~FileDevice() override;

  const std::string& uri() const override { return uri_; }
  Transport transport() const override { return Transport::file; }
  Limits limits() const override;
  Gone gone() const override { return {"the file's controller was given up", "open the file again"}; }
  std::uint32_t read32(std::uint32_t offset) override;
  std::uint64_t read64(std::uint32_t offset) override;
  void write32(std::uint32_t offset, std::uint32_t value) override;
  void write64(std::uint32_t offset, std::uint64_t value) override;
  std::uint32_t* doorbell(std::uint32_t) override { return nullptr; }
  Mapping map(void* address, Bytes length, Access access, std::uint64_t* pages) override;
  void unmap(const Mapping&) noexcept override {}
  void set_interrupts(std::span<const int> eventfds) override;
  /// True where nothing is in flight, or has ended when it was cancelled, within a bound.
  bool reset() noexcept override;
  Turn turn() const override;
  void* turn_context() const override { return const_cast<FileDevice*>(this); }
  Medium medium() const override;
  std::uint64_t end_at(std::uint64_t position) const override;
  Place place_of(std::uint64_t position) const override;

  // --- Pools: one controller for many files, so that none costs a bring-up -------------------------------------------

  /// Bytes of the device that each file has.
  static constexpr unsigned kFileShift = 44;
  static constexpr std::uint64_t kFileSpan = std::uint64_t{1} << kFileShift;
  static constexpr std::size_t kMostFiles = std::size_t{1} << 18;
  /// Gives a file its place: where on the device its byte 0 is. Throws Failure(EMFILE). Thread-safe.
  std::uint64_t attach(std::shared_ptr<file::File> file);
  /// Commands that come for the place from now on fail; those in flight keep the file open.
  void detach(std::uint64_t place) noexcept;

 private:
  /// A command that the kernel is at.
  struct Flight : file::Request {
    std::uint16_t cid = 0;
    bool used = false;
    std::shared_ptr<file::File> keeps;
    Flight* next = nullptr;
  };
  struct IoQueue {
    std::mutex lock;
    /// Whether answers were taken that may not be posted yet.
    std::atomic<bool> busy{false};
    std::unique_ptr<file::Queue> io;
    bool has_completions = false, has_submissions = false;
    std::byte* submission = nullptr;
    std::byte* completion = nullptr;
    std::uint32_t entries = 0, head = 0, tail = 0;
    std::uint32_t completion_entries = 0, completion_tail = 0;
    bool phase = true;
    std::uint16_t id = 0;
    std::vector<Flight> flights;
    Flight* free = nullptr;
  };
  struct AdminQueue {
    std::byte* submission = nullptr;
    std::byte* completion = nullptr;
    std::uint32_t entries = 0, head = 0, completion_entries = 0, completion_tail = 0;
    bool phase = true;
  };
  static constexpr std::uint32_t kMostQueues = 5;

  void take_parameters(const Uri& uri);
  std::shared_ptr<file::File> file_at(std::uint64_t& position) const;
  std::unique_ptr<file::Io> make_io(std::uint32_t depth);
  void ring(std::uint32_t index, std::uint32_t value);
  void configure(std::uint32_t value);
  void work(IoQueue& queue);
  void fetch(IoQueue& queue);
  void begin(IoQueue& queue, const nvme::SubmissionEntry& entry);
  void tell(IoQueue& queue, Flight& flight);
  void post(IoQueue& queue, std::uint16_t cid, std::uint16_t status, std::uint32_t result);
  void administer(std::uint32_t tail);
  std::uint16_t execute(const nvme::SubmissionEntry& entry, std::uint32_t& result);
  std::uint16_t create_completions(const nvme::SubmissionEntry& entry);
  std::uint16_t create_submissions(const nvme::SubmissionEntry& entry);
  void abort(std::uint16_t queue, std::uint16_t cid);
  void cancel_all() noexcept;
  std::uint32_t in_flight() noexcept;
  void identify(const nvme::SubmissionEntry& entry);

  std::string uri_;
  enum class Wanted : std::uint8_t { any, uring, threads };
  Wanted wanted_ = Wanted::any;
  bool is_pool_ = false;
  std::string io_name_, why_threads_;
  std::shared_ptr<file::File> file_;
  mutable std::mutex files_lock_;
  std::vector<std::shared_ptr<file::File>> files_;
  std::vector<std::size_t> free_places_;

  std::mutex admin_lock_;  ///< of all that is below, but for what an I/O queue's own lock guards
  AdminQueue admin_;
  std::uint32_t cc_ = 0, aqa_ = 0;
  std::uint64_t asq_ = 0, acq_ = 0;
  std::atomic<bool> enabled_{false}, shut_down_{false};
  std::vector<int> eventfds_;
  std::array<IoQueue, kMostQueues> queues_;
};

}  // namespace ugds::device
