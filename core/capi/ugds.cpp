// SPDX-License-Identifier: Apache-2.0
//
// The C API: arguments to the engine, errors to codes. No exception leaves it.
#include "ugds.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/immortal.hpp"
#include "capi/gpu.hpp"
#include "capi/internal.hpp"
#include "device/pci.hpp"
#include "engine/one_command.hpp"
#include "engine/staged.hpp"
#include "engine/stream.hpp"
#include "engine/table.hpp"
#include "memory/host.hpp"
#include "memory/registry.hpp"

namespace {

using namespace ugds::capi;
using ugds::Error;
using ugds::last_error;
using ugds::engine::HandleId;
using ugds::engine::Table;
using ugds::engine::Transfer;
using ugds::memory::Reference;
using ugds::memory::Registry;
using ugds::nvme::Opcode;

static_assert(sizeof(uGDSDescr_t) == 16 && sizeof(uGDSError_t) == 8);
static_assert(sizeof(uGDSIOParams_t) == 48 && sizeof(uGDSIOEvents_t) == 24);

/// What C callers opened and registered, for the last uGDSDriverClose. Python's are its own.
struct Driver {
  std::mutex lock;
  std::atomic<int> opened{0};
  std::vector<HandleId> handles;
  std::vector<Reference> buffers;
  std::vector<std::unique_ptr<ugds::memory::HostMemory>> memory;
};

constinit ugds::Immortal<Driver> the_driver;
Driver& driver() { return the_driver.value; }

void prepare_for_fork() {
  static const bool hooked = [] {
    ugds::on_fork(ugds::ForkOrder::c_driver, {[] { driver().lock.lock(); }, [] { driver().lock.unlock(); },
                                              [] {
                                                driver().handles.clear();  // the parent's
                                                driver().buffers.clear();
                                                for (auto& memory : driver().memory)
                                                  static_cast<void>(memory.release());  // not inherited
                                                driver().memory.clear();
                                                driver().lock.unlock();
                                              }});
    return true;
  }();
  static_cast<void>(hooked);
}

/// A buffer in words.
std::string name_of(const Reference& buffer) {
  char text[64];
  std::snprintf(text, sizeof text, "the buffer at %#llx", static_cast<unsigned long long>(buffer.address));
  return text;
}

bool is_open() { return driver().opened.load(std::memory_order_relaxed) != 0; }

[[gnu::cold]] ssize_t refuse_negative(Opcode opcode) {
  refuse(ugds::engine::operation_name(opcode), UGDS_INVALID_VALUE, EINVAL, "a negative offset");
  return -EINVAL;
}

ssize_t run_either(ugds::engine::Handle& handle, const ugds::engine::Transfer& transfer) {
  return ugds::engine::is_staged_transfer(handle, transfer) ? ugds::engine::run_staged(handle, transfer, {})
                                                            : ugds::engine::run(handle, transfer);
}

/// GPU memory from a multiple of 64 KiB on is registered for the call.
[[gnu::cold, gnu::noinline]] ssize_t transfer_unregistered(const Table::Use& handle, Opcode opcode, const void* buf,
                                                           size_t size, off_t file_offset, off_t buf_offset) try {
  // In integers: the pointer may be of anything.
  const auto begin = reinterpret_cast<std::uintptr_t>(buf), at = begin + static_cast<std::uintptr_t>(buf_offset);
  const ugds::capi::TemporaryBuffer temporary(begin == 0 || at < begin ? nullptr : reinterpret_cast<const void*>(at),
                                              size, handle->geometry().number);
  return run_either(*handle, {opcode, temporary.reference(), static_cast<std::uint64_t>(file_offset), size, 0});
} catch (const ugds::Failure& failure) {
  last_error() = failure.error();
  last_error().operation = ugds::engine::operation_name(opcode);
  return -failure.error().code;
}

/// Whatever is not one command that can be staged at once.
[[gnu::cold, gnu::noinline]] ssize_t transfer_any(const Table::Use& handle, Opcode opcode, const void* buf, size_t size,
                                                  off_t file_offset, off_t buf_offset) {
  if (file_offset < 0 || buf_offset < 0) return refuse_negative(opcode);
  const Reference buffer = Registry::instance().find(buf);
  if (!buffer) return transfer_unregistered(handle, opcode, buf, size, file_offset, buf_offset);
  return run_either(*handle,
                    {opcode, buffer, static_cast<std::uint64_t>(file_offset), size, place_in(buffer, buf, buf_offset)});
}

/// What is not done after some turns, or failed.
[[gnu::cold, gnu::noinline]] ssize_t resume(const Table::Use& handle, ugds::engine::OneCommand& command, Opcode opcode,
                                            const void* buf, size_t size, off_t file_offset, off_t buf_offset) {
  const Reference buffer = Registry::instance().find(buf);
  return command.resume(
      *handle, {opcode, buffer, static_cast<std::uint64_t>(file_offset), size, place_in(buffer, buf, buf_offset)});
}

/// Flattened: the whole path of a request that meets no obstacle is this one function.
template <Opcode opcode>
[[gnu::flatten]] ssize_t transfer(uGDSHandle_t fh, const void* buf, size_t size, off_t file_offset, off_t buf_offset) {
  Table& table = Table::instance();
  const Table::Use handle(table, id_of(fh));
  if (!handle) [[unlikely]]
    return table.explain_stale(id_of(fh), ugds::engine::operation_name(opcode));
  const Reference buffer = Registry::instance().find(buf);
  ugds::engine::OneCommand command;
  // A negative file_offset is too large a number.
  if (buf_offset < 0 ||
      !command.start(*handle, handle.caller(), opcode, buffer, static_cast<std::uint64_t>(file_offset), size,
                     place_in(buffer, buf, buf_offset))) [[unlikely]] {
    return transfer_any(handle, opcode, buf, size, file_offset, buf_offset);
  }
  for (unsigned turns = 0; turns < ugds::engine::kPatience; ++turns) {
    if (!command.turn(handle->turn())) continue;
    if (!command.failed()) [[likely]]
      return static_cast<ssize_t>(size);
    break;
  }
  return resume(handle, command, opcode, buf, size, file_offset, buf_offset);
}

std::string uri_of(const uGDSDescr_t& descr) {
  if (descr.type == UGDS_HANDLE_TYPE_USERSPACE_FS) {
    if (descr.handle.handle == nullptr)
      ugds::fail(EINVAL, "open", "a null URI", "pass a const char* such as \"emulated:1GiB\"");
    return static_cast<const char*>(descr.handle.handle);
  }
  if (descr.type != UGDS_HANDLE_TYPE_OPAQUE_FD) {
    ugds::fail(EINVAL, "open", "a descriptor of type " + std::to_string(descr.type), "use 1 (fd) or 3 (URI)");
  }
  struct stat status;
  if (fstat(descr.handle.fd, &status) != 0) {
    ugds::fail(EINVAL, "open", "descriptor " + std::to_string(descr.handle.fd) + " is not open",
               "pass an open descriptor of /dev/ugds_drvN, or descriptor type 3 with a URI");
  }
  const auto node = S_ISCHR(status.st_mode) ? ugds::device::helper_node(status.st_rdev) : std::nullopt;
  if (node) return "/dev/" + *node + "?fd=" + std::to_string(descr.handle.fd);
  if (S_ISREG(status.st_mode) || S_ISBLK(status.st_mode)) return "file:?fd=" + std::to_string(descr.handle.fd);
  ugds::fail(EOPNOTSUPP, "open",
             "descriptor " + std::to_string(descr.handle.fd) +
                 " is neither a file, nor a block device, nor one of /dev/ugds_drvN",
             "open one of these, or use descriptor type 3 with a URI such as emulated:1GiB");
}

uGDSError_t keep_registered(const void* base, size_t size, WantedBackend backend, bool exported) {
  return guarded("register", [&] {
    const Reference buffer = ugds::capi::register_memory(base, size, backend, exported);
    try {
      std::lock_guard guard(driver().lock);
      driver().buffers.push_back(buffer);
    } catch (...) {
      Registry::instance().close(buffer);
      throw;
    }
    return answer(UGDS_SUCCESS);
  });
}

}  // namespace

extern "C" {

uGDSError_t uGDSDriverOpen(void) {
  return guarded("driver open", [] {
    prepare_for_fork();
    std::lock_guard guard(driver().lock);
    ++driver().opened;
    return answer(UGDS_SUCCESS);
  });
}

uGDSError_t uGDSDriverClose(void) {
  return guarded("driver close", [] {
    Driver& d = driver();
    std::unique_lock guard(d.lock);
    if (d.opened == 0) {
      return refuse("driver close", UGDS_DRIVER_NOT_INITIALIZED, EINVAL, "the driver is not open",
                    "call uGDSDriverOpen() once for each uGDSDriverClose()");
    }
    if (--d.opened != 0) return answer(UGDS_SUCCESS);
    std::vector<Reference> buffers = std::exchange(d.buffers, {});
    std::vector<HandleId> handles = std::exchange(d.handles, {});
    guard.unlock();  // nothing is closed under it: closing takes locks that `fork` takes before this one
    bool has_regions = false;
    std::string held;
    const auto keep = [&](const std::string& what, const std::string& why) {
      held += (held.empty() ? "" : "; ") + what + ": " + why;
    };
    std::erase_if(buffers, [&](const Reference& b) {
      const int code = close_buffer(b);
      has_regions = has_regions || code == UGDS_RDMA_REGION_ACTIVE;
      if (code == UGDS_RDMA_REGION_ACTIVE) keep(name_of(b), regions_of(b));
      if (code == UGDS_BUSY) keep(name_of(b), Registry::instance().holders(b));
      return code == UGDS_SUCCESS || code == UGDS_MEMORY_NOT_REGISTERED;
    });
    std::erase_if(handles, [&](HandleId id) {
      std::string why;
      if (Table::instance().close(id, Table::Mode::check, 0, &why) != EBUSY) return true;
      const Table::Use handle(Table::instance(), id);
      keep(handle ? handle->uri() : "a device", why);
      return false;
    });
    if (handles.empty() && buffers.empty()) return answer(UGDS_SUCCESS);
    guard.lock();
    ++d.opened;
    d.buffers.insert(d.buffers.end(), buffers.begin(), buffers.end());
    d.handles.insert(d.handles.end(), handles.begin(), handles.end());
    if (has_regions) {
      return refuse("driver close", UGDS_RDMA_REGION_ACTIVE, EBUSY, held.c_str(), "call uGDSRDMAUnregister() first");
    }
    return refuse_busy("driver close", held, "wait for the requests, and deregister handles");
  });
}

uGDSError_t uGDSHandleRegister(uGDSHandle_t* fh, const uGDSDescr_t* descr) {
  if (!is_open()) {
    return refuse("open", UGDS_DRIVER_NOT_INITIALIZED, EINVAL, "the driver is not open", "call uGDSDriverOpen() first");
  }
  if (fh == nullptr || descr == nullptr) return refuse("open", UGDS_INVALID_VALUE, EINVAL, "a null argument");
  *fh = nullptr;
  uGDSError_t opened = guarded("open", [&] {
    const HandleId id = Table::instance().open(uri_of(*descr), {});
    try {
      std::lock_guard guard(driver().lock);
      driver().handles.push_back(id);
    } catch (...) {
      Table::instance().abandon(id);
      throw;
    }
    *fh = reinterpret_cast<uGDSHandle_t>(id);
    return answer(UGDS_SUCCESS);
  });
  if (opened.err == UGDS_DEVICE_LOST) opened.err = UGDS_DEVICE_NOT_FOUND;  // it is not there to be lost
  return opened;
}

uGDSError_t uGDSHandleDeregisterEx(uGDSHandle_t fh, int timeout_s) {
  return guarded("close", [&] {
    using Mode = Table::Mode;
    const Mode mode = timeout_s == 0    ? Mode::check
                      : timeout_s > 0   ? Mode::bounded
                      : timeout_s == -1 ? Mode::wait
                                        : Mode::force;
    const auto limit = static_cast<std::uint64_t>(std::max(timeout_s, 0)) * 1'000'000'000u;
    std::string held;
    switch (Table::instance().close(id_of(fh), mode, limit, &held)) {
      case 0: {
        std::lock_guard guard(driver().lock);
        std::erase(driver().handles, id_of(fh));
        return answer(UGDS_SUCCESS);
      }
      case EBUSY:
        return refuse_busy("close", held, "wait for the requests; what is wedged is released by force after a reset");
      default: Table::instance().explain_stale(id_of(fh), "close"); return answer(UGDS_HANDLE_NOT_REGISTERED);
    }
  });
}

void uGDSHandleDeregister(uGDSHandle_t fh) { uGDSHandleDeregisterEx(fh, -1); }

uGDSError_t uGDSGetDeviceCapacity(uGDSHandle_t fh, uint64_t* bytes) {
  if (bytes == nullptr) return refuse("capacity", UGDS_INVALID_VALUE, EINVAL, "a null argument");
  const Table::Use handle(Table::instance(), id_of(fh));
  if (!handle) {
    Table::instance().explain_stale(id_of(fh), "capacity");
    return answer(UGDS_HANDLE_NOT_REGISTERED);
  }
  *bytes = handle->capacity();
  return answer(UGDS_SUCCESS);
}

uGDSError_t uGDSBufRegister(const void* base, size_t size, int flags) {
  if (!is_open()) {
    return refuse("register", UGDS_DRIVER_NOT_INITIALIZED, EINVAL, "the driver is not open",
                  "call uGDSDriverOpen() first");
  }
  if ((flags & ~(UGDS_BUF_DMABUF | UGDS_BUF_RDMA | UGDS_BUF_FORCE_CUDA)) != 0) {
    return refuse("register", UGDS_INVALID_VALUE, EINVAL, "unknown flags");
  }
  const auto backend = (flags & UGDS_BUF_FORCE_CUDA) != 0 ? WantedBackend::cuda : WantedBackend::any;
  return keep_registered(base, size, backend, (flags & (UGDS_BUF_DMABUF | UGDS_BUF_RDMA)) != 0);
}

uGDSError_t uGDSBufRegisterEx(const void* base, size_t size, const uGDSBufConfig_t* config) {
  if (config == nullptr) return uGDSBufRegister(base, size, 0);
  if (!is_open()) return uGDSBufRegister(base, size, 0);
  if (config->backend < 0 || config->backend > 2)
    return refuse("register", UGDS_INVALID_VALUE, EINVAL, "an unknown backend");
  return keep_registered(base, size, static_cast<WantedBackend>(config->backend), config->enable_export);
}

void* uGDSHostAlloc(size_t size) {
  void* memory = nullptr;
  guarded("allocate", [&] {
    prepare_for_fork();
    auto made = std::make_unique<ugds::memory::HostMemory>(size);
    std::lock_guard guard(driver().lock);
    driver().memory.push_back(std::move(made));
    memory = driver().memory.back()->data();
    return answer(UGDS_SUCCESS);
  });
  return memory;
}

uGDSError_t uGDSHostFree(void* memory) {
  if (memory == nullptr) return answer(UGDS_SUCCESS);
  auto& driver_memory = driver().memory;
  const auto find = [&] {
    return std::find_if(driver_memory.begin(), driver_memory.end(),
                        [&](const auto& mine) { return mine->data() == memory; });
  };
  std::unique_ptr<ugds::memory::HostMemory> freed;  // without the lock: it takes others
  {
    std::lock_guard guard(driver().lock);
    if (const auto found = find(); found != driver_memory.end()) {
      freed = std::move(*found);
      driver_memory.erase(found);
    }
  }
  if (!freed) {
    return refuse("free", UGDS_INVALID_VALUE, EINVAL,
                  unless_forked("the memory is not from uGDSHostAlloc, or was freed before",
                                "the memory is not from uGDSHostAlloc in this process, a child of a fork, or was freed "
                                "before"));
  }
  if (Registry::instance().overlaps(memory, freed->size())) {
    std::lock_guard guard(driver().lock);
    driver_memory.push_back(std::move(freed));
    return refuse("free", UGDS_BUSY, EBUSY, "the memory is registered", "call uGDSBufDeregister() first");
  }
  return answer(UGDS_SUCCESS);
}

uGDSError_t uGDSBufDeregister(const void* base) {
  return guarded("deregister", [&] {
    const Reference found = Registry::instance().find(base);
    if (!found || found.address != reinterpret_cast<std::uintptr_t>(base)) {
      return refuse_unregistered("deregister");
    }
    switch (close_buffer(found)) {
      case UGDS_SUCCESS: {
        std::lock_guard guard(driver().lock);
        std::erase_if(driver().buffers, [&](const Reference& b) { return b.generation == found.generation; });
        return answer(UGDS_SUCCESS);
      }
      case UGDS_RDMA_REGION_ACTIVE:
        return refuse("deregister", UGDS_RDMA_REGION_ACTIVE, EBUSY, regions_of(found).c_str(),
                      "call uGDSRDMAUnregister() first");
      case UGDS_BUSY: {
        const std::string held = Registry::instance().holders(found);
        return refuse_busy(
            "deregister", held.empty() ? "what used the buffer has ended just now" : "in flight on the buffer: " + held,
            "wait for them");
      }
      default: return refuse("deregister", UGDS_MEMORY_NOT_REGISTERED, ESTALE, "the buffer was deregistered meanwhile");
    }
  });
}

ssize_t uGDSRead(uGDSHandle_t fh, void* buf, size_t size, off_t file_offset, off_t buf_offset) {
  return transfer<Opcode::read>(fh, buf, size, file_offset, buf_offset);
}

ssize_t uGDSWrite(uGDSHandle_t fh, const void* buf, size_t size, off_t file_offset, off_t buf_offset) {
  return transfer<Opcode::write>(fh, buf, size, file_offset, buf_offset);
}

ssize_t uGDSFlush(uGDSHandle_t fh) {
  const Table::Use handle(Table::instance(), id_of(fh));
  if (!handle) return Table::instance().explain_stale(id_of(fh), "flush");
  return ugds::engine::run(*handle, {.opcode = Opcode::flush});
}

ssize_t uGDSDiscard(uGDSHandle_t fh, off_t file_offset, size_t size) {
  const Table::Use handle(Table::instance(), id_of(fh));
  if (!handle) return Table::instance().explain_stale(id_of(fh), "discard");
  if (file_offset < 0) {
    refuse("discard", UGDS_INVALID_VALUE, EINVAL, "a negative offset");
    return -EINVAL;
  }
  const std::int64_t result = ugds::engine::discard(*handle, static_cast<std::uint64_t>(file_offset), size);
  return result < 0 ? result : 0;
}

int uGDSVersion(void) { return 10000 * UGDS_VERSION_MAJOR + 100 * UGDS_VERSION_MINOR + UGDS_VERSION_PATCH; }

size_t uGDSGetLastError(char* text, size_t size) {
  const Error& error = last_error();
  if (error.code == 0) {
    if (text != nullptr && size != 0) text[0] = '\0';
    return 0;
  }
  try {
    const std::string message = error.message();
    if (text != nullptr && size != 0) std::snprintf(text, size, "%s", message.c_str());
    return message.size();
  } catch (...) {
    if (text != nullptr && size != 0) std::snprintf(text, size, "%s", std::strerror(error.code));
    return std::strlen(std::strerror(error.code));
  }
}

}  // extern "C"
