// SPDX-License-Identifier: Apache-2.0
//
// Registrations: Python memory, pinned and mapped.
#include <fcntl.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <mutex>
#include <vector>

#include "base/units.hpp"
#include "batch.hpp"
#include "common.hpp"
#include "engine/stream.hpp"
#include "gpu/runtime.hpp"
#include "memory.hpp"

namespace ugds::python {

namespace {

class Ours final : public Keeper {
 public:
  explicit Ours(std::uint64_t size) : memory(size) {}
  memory::HostMemory memory;
};

/// Addresses that stand for memory of a DMA-BUF, at which there is nothing, and the DMA-BUF.
class Peer final : public Keeper {
 public:
  Peer(int descriptor, std::uint64_t size) : descriptor_(fcntl(descriptor, F_DUPFD_CLOEXEC, 0)), size_(size) {
    if (!descriptor_) fail(errno, "register_dmabuf", "that is no open file descriptor", "give the DMA-BUF's");
    address_ = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address_ == MAP_FAILED) fail(ENOMEM, "register_dmabuf", "no addresses for the buffer", "register less");
  }
  ~Peer() override { munmap(address_, size_); }
  void* address() const { return address_; }
  int descriptor() const { return descriptor_.get(); }

 private:
  Descriptor descriptor_;
  void* address_ = nullptr;
  std::uint64_t size_;
};

/// Registrations whose Python object went while commands were in flight.
struct Retired {
  memory::Reference reference;
  nb::object owner;
  std::unique_ptr<Keeper> keeper;
};
std::mutex retired_lock;
std::vector<Retired>& retired() {
  static auto* list = new std::vector<Retired>;  // NOLINT: outlives the interpreter's own teardown
  return *list;
}
std::atomic<std::size_t> retired_count{0};

memory::Demand demand_of(const std::optional<std::string>& require, bool is_gpu) {
  if (!require) return memory::Demand::none;
  if (*require == "direct") return memory::Demand::direct;
  if (*require == "staged" && is_gpu) return memory::Demand::staged;
  if (*require == "staged" || *require == "buffered") {
    raise_new(EOPNOTSUPP, "register",
              "route=\"" + *require +
                  "\" cannot be had: " + (is_gpu ? "only files are buffered" : "the device reaches host memory itself"),
              "leave `require` out, or ask for \"direct\"");
  }
  raise_new(EINVAL, "register", "\"" + *require + "\" is no route", "use \"direct\", \"staged\" or \"buffered\"");
}

std::vector<std::uint32_t> numbers_of(const std::optional<std::vector<nb::object>>& devices) {
  std::vector<std::uint32_t> numbers;
  if (!devices) return numbers;
  if (devices->empty()) raise_new(EINVAL, "register", "an empty list of devices", "name one, or leave `devices` out");
  for (const nb::object& object : *devices) {
    auto& table = engine::Table::instance();
    if (!nb::isinstance<PyDevice>(object)) throw nb::type_error("devices must be a sequence of Device objects");
    const auto& device = nb::cast<const PyDevice&>(object);
    const engine::Table::Use handle(table, device.id);
    if (!handle) {
      table.explain_stale(device.id, "register");
      raise_last();
    }
    numbers.push_back(handle->geometry().number);
  }
  return numbers;
}

/// The registration of GPU memory, without the interpreter lock.
memory::Reference add_gpu(Memory& memory, memory::Demand demand, const std::vector<std::uint32_t>& devices,
                          bool listed) {
  gpu::Allocation allocation;
  gpu::Runtime* const runtime = gpu::owner_of(memory.address, allocation);
  if (runtime == nullptr) {
    std::string why;
    if (gpu::cuda(&why) == nullptr) {
      fail(EOPNOTSUPP, "register", "the buffer is said to be GPU memory, and there is no GPU's driver: " + why,
           "install the driver, or name its library by UGDS_CUDA_LIBRARY");
    }
    fail(EFAULT, "register", "the buffer is said to be GPU memory, and the driver does not know its address",
         "check that the array was not freed");
  }
  memory.kind = runtime->backend() == gpu::Backend::cuda ? memory::Kind::cuda : memory::Kind::hip;
  memory.place = allocation.place;
  memory.runtime = runtime;
  const auto address = reinterpret_cast<std::uintptr_t>(memory.address);
  auto buffer = std::make_unique<memory::GpuBuffer>(*runtime, allocation, address);
  auto& registry = memory::Registry::instance();
  if (!listed) return registry.add_gpu_unlisted(address, memory.size, memory.readonly, std::move(buffer), devices[0]);
  return registry.add_gpu(address, memory.size, memory.readonly, std::move(buffer), demand, devices);
}

/// `listed`: others find it by its addresses; where not, it is GPU memory for one device.
PyRegistration add(Memory memory, nb::object owner, const std::vector<std::uint32_t>& devices,
                   memory::Demand demand = memory::Demand::none, bool listed = true) {
  PyRegistration registration;
  // Large buffers take a while to be mapped; the caller's reference keeps the memory meanwhile.
  registration.reference = without_lock([&] {
    if (memory.is_gpu) return add_gpu(memory, demand, devices, listed);
    return memory::Registry::instance().add(memory.address, memory.size, memory.kind, memory.readonly, devices,
                                            memory.peer);
  });
  registration.kind = memory.kind;
  registration.runtime = memory.runtime;
  registration.place = memory.place;
  registration.owner = std::move(owner);
  registration.keeper = std::move(memory.keeper);
  return registration;
}

/// Retires what has been completed and nobody waits for, such as an interrupted request's commands.
void reap_all() {
  auto& table = engine::Table::instance();
  for (std::uint32_t i = 0; const engine::HandleId id = table.nth(i); ++i) {
    const engine::Table::Use handle(table, id);
    if (handle) handle->drain(0);
  }
}

void close(PyRegistration& self) {
  if (self.closed) return;
  const memory::Reference reference = self.reference;
  const int code = without_lock([&] {
    auto& registry = memory::Registry::instance();
    const int first = registry.close(reference);
    if (first != EBUSY) return first;
    reap_all();
    return engine::close_registration(reference);
  });
  if (code == EBUSY) {
    Error error;
    error.code = EBUSY;
    error.operation = "close registration";
    error.length = reference.size;
    const std::string held = memory::Registry::instance().holders(reference);
    set_cause(error, "in flight on the buffer: %s", held.empty() ? "what has ended just now" : held.c_str());
    set_hint(error,
             "wait for the requests; after a time-out the buffer is held until the device is known to have stopped");
    raise(error);
  }
  self.closed = true;
  if (self.exports == 0) self.keeper.reset();
  self.owner = nb::none();
}

memory::Registry::Way way_of(const PyRegistration& registration) {
  return memory::Registry::instance().way(registration.reference);
}

int get_buffer(PyObject* exporter, Py_buffer* view, int flags) {
  auto& self = *nb::inst_ptr<PyRegistration>(exporter);
  if (self.closed) {
    PyErr_SetString(PyExc_BufferError, "the registration is closed");
    return -1;
  }
  if (self.kind != memory::Kind::host) {
    PyErr_SetString(PyExc_BufferError, "the registration is of memory that the processor does not reach here");
    return -1;
  }
  const int result =
      PyBuffer_FillInfo(view, exporter, reinterpret_cast<void*>(self.reference.address),
                        static_cast<Py_ssize_t>(self.reference.size), self.reference.readonly ? 1 : 0, flags);
  if (result == 0) ++self.exports;
  return result;
}

/// The last view of a closed registration lets go of its memory.
void release_buffer(PyObject* exporter, Py_buffer*) {
  auto& self = *nb::inst_ptr<PyRegistration>(exporter);
  if (--self.exports == 0 && self.closed) self.keeper.reset();
}

/// A registration without memory is none: it is made by `register` and `empty` alone.
PyObject* refuse_new(PyTypeObject*, PyObject*, PyObject*) {
  PyErr_SetString(PyExc_TypeError, "a Registration is made by ugds.register or ugds.empty");
  return nullptr;
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  if (!nb::inst_ready(object)) return 0;
  const auto& self = *nb::inst_ptr<PyRegistration>(object);
  Py_VISIT(self.owner.ptr());
  Py_VISIT(exporter_of(self.keeper.get()));
  return 0;
}

/// Of a cycle that nothing else refers to. As when it is dropped: closed, unless commands are in flight. Then it stays
/// as it is, and so does its memory, until a later collection.
int clear(PyObject* object) {
  if (!nb::inst_ready(object)) return 0;
  auto& self = *nb::inst_ptr<PyRegistration>(object);
  if (!self.closed && self.reference) {
    if (memory::Registry::instance().close(self.reference) == EBUSY) return 0;
    self.closed = true;
  }
  // Moved out first: what is dropped here may come back to this object.
  const nb::object owner = std::move(self.owner);
  const std::unique_ptr<Keeper> keeper = self.exports == 0 ? std::move(self.keeper) : nullptr;
  return 0;
}

PyType_Slot registration_slots[] = {{Py_tp_new, reinterpret_cast<void*>(refuse_new)},
                                    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                    {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                    {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                                    {Py_bf_releasebuffer, reinterpret_cast<void*>(release_buffer)},
                                    {0, nullptr}};

}  // namespace

PyRegistration::~PyRegistration() {
  if (closed || !reference) return;
  if (memory::Registry::instance().close(reference) != EBUSY) return;
  std::lock_guard guard(retired_lock);
  retired().push_back({reference, std::move(owner), std::move(keeper)});
  retired_count.fetch_add(1, std::memory_order_relaxed);
}

void count_retired(std::ptrdiff_t change) {
  retired_count.fetch_add(static_cast<std::size_t>(change), std::memory_order_relaxed);
}

bool anything_retired() { return retired_count.load(std::memory_order_relaxed) != 0; }

void collect_retired() {
  if (!anything_retired()) return;
  reap_all();
  collect_retired_batches();
  std::vector<Retired> closed;  // destroyed after the lock is let go: it drops Python references
  std::lock_guard guard(retired_lock);
  std::erase_if(retired(), [&](Retired& item) {
    if (memory::Registry::instance().close(item.reference) == EBUSY) return false;
    closed.push_back(std::move(item));
    return true;
  });
  count_retired(-static_cast<std::ptrdiff_t>(closed.size()));
}

View view_of(nb::handle buffer, const char* operation, Temporary* temporary) {
  constexpr std::uint64_t kGpuPage = 64 * 1024;
  Memory memory = memory_of(buffer);
  const memory::Reference found = memory::Registry::instance().find(memory.address);
  const std::uint64_t begin = reinterpret_cast<std::uintptr_t>(memory.address);
  if (!found || begin + memory.size > found.address + found.size) {
    if (memory.is_gpu && temporary != nullptr && is_aligned(begin, kGpuPage)) {
      const std::uint64_t size = memory.size;
      const bool readonly = memory.readonly;
      temporary->registration.emplace(
          add(std::move(memory), nb::borrow(buffer), {temporary->device}, memory::Demand::none, false));
      View view{temporary->registration->reference, 0, size};
      view.buffer.readonly = readonly;
      return view;
    }
    if (memory.is_gpu && temporary != nullptr) {
      raise_new(EINVAL, operation, "the GPU buffer is not registered, and does not begin at a multiple of 64 KiB",
                "use `with ugds.register(x) as buf:` once, before I/O");
    }
    raise_new(EINVAL, operation, "the buffer is not registered",
              "use `with ugds.register(x) as buf:` once, before I/O");
  }
  View view{found, begin - found.address, memory.size};
  view.buffer.readonly = found.readonly || memory.readonly;
  return view;
}

PyTypeObject* registration_type = nullptr;

void define_registration(nb::module_& m) {
  auto type =
      nb::class_<PyRegistration>(
          m, "Registration", nb::type_slots(registration_slots), nb::is_final(),
          "A buffer that is pinned and mapped to the open devices, until `close()`. Made by `ugds.register` and\n"
          "`ugds.empty`. Supports the buffer protocol. Thread-safe.")
          .def_prop_ro(
              "address", [](const PyRegistration& r) { return r.reference.address; }, "Address of the first byte.")
          .def_prop_ro(
              "nbytes", [](const PyRegistration& r) { return r.reference.size; }, "Size in bytes.")
          .def_prop_ro(
              "memory", [](const PyRegistration& r) { return memory::kind_name(r.kind); },
              "Kind of memory: \"host\", \"cuda\", \"hip\", or \"peer\": another device's, by DMA-BUF.")
          .def_prop_ro(
              "route", [](const PyRegistration& r) { return memory::route_name(way_of(r).route); },
              "Where the device's DMA lands: \"direct\" is in this buffer, \"staged\" in pinned memory of ours, from "
              "which the\n"
              "GPU's copy engine moves it on. Staged where one of the open devices needs that.")
          .def_prop_ro(
              "why", [](const PyRegistration& r) { return way_of(r).why; }, "Why the route is what it is.")
          .def_prop_ro(
              "gpu",
              [](const PyRegistration& r) { return r.runtime != nullptr ? nb::cast(r.place.device) : nb::none(); },
              "The number of the GPU that has the memory, or None.", nb::sig("def gpu(self) -> int | None"))
          .def_prop_ro(
              "readonly", [](const PyRegistration& r) { return r.reference.readonly; },
              "Whether only writes to a device may use it.")
          .def_prop_ro(
              "generation", [](const PyRegistration& r) { return r.reference.generation; },
              "The number of this registration; later ones have larger numbers.")
          .def_prop_ro(
              "closed", [](const PyRegistration& r) { return r.closed; }, "Whether `close()` was called.")
          .def_prop_ro(
              "owner", [](const PyRegistration& r) { return r.owner.is_valid() ? r.owner : nb::object(nb::none()); },
              "The object that was registered.", nb::sig("def owner(self) -> object"))
          .def("close", &close,
               "Unmaps the buffer. Raises `ugds.Error` (EBUSY) while commands on it are in flight; nothing has changed "
               "then.\n"
               "Does nothing the second time.")
          .def("__enter__", [](nb::object self) { return self; })
          .def("__exit__",
               [](PyRegistration& self, nb::args exception) {
                 // An interrupt that leaves the block is not replaced by EBUSY: the buffer is held until its commands
                 // retire, and closed when it is dropped.
                 const bool leaving = exception.size() != 0 && !exception[0].is_none();
                 try {
                   close(self);
                 } catch (const Failure& failure) {
                   if (!leaving || failure.error().code != EBUSY) throw;
                 }
               })
          .def("__len__", [](const PyRegistration& r) { return r.reference.size; })
          .def("__reduce__",
               [](const PyRegistration&) -> nb::object {
                 throw nb::type_error("a Registration cannot be pickled or copied: it is memory of this process");
               })
          .def("__repr__", [](const PyRegistration& r) {
            return "<ugds.Registration " + std::to_string(r.reference.size) +
                   " bytes, memory=" + memory::kind_name(r.kind) +
                   " route=" + memory::route_name(r.closed ? memory::Route::direct : way_of(r).route) +
                   (r.closed ? " closed>" : ">");
          });

  registration_type = reinterpret_cast<PyTypeObject*>(type.ptr());

  m.def(
      "register",
      [](nb::object object, std::optional<std::vector<nb::object>> devices, std::optional<std::string> require) {
        collect_retired();
        const auto numbers = numbers_of(devices);
        Memory memory = memory_of(object);
        const memory::Demand demand = demand_of(require, memory.is_gpu);
        return add(std::move(memory), std::move(object), numbers, demand);
      },
      nb::arg("obj"), nb::arg("devices") = nb::none(), nb::arg("require") = nb::none(),
      "Pins a buffer and maps it to every open device, and to those opened later.\n\n"
      "obj: contiguous memory of any alignment and size, by the buffer protocol (NumPy, bytearray, memoryview, mmap) "
      "or\n"
      "DLPack (torch, JAX), or GPU memory by `__cuda_array_interface__` or DLPack (torch, CuPy, JAX, Numba). "
      "Read-only\n"
      "memory can only be written to a device. `devices` narrows it to some devices. `require` demands a route: "
      "\"direct\",\n"
      "or for GPU memory \"staged\"; without it GPU memory is direct where the device can reach it, else staged, and\n"
      "`route` and `why` say which.\n\n"
      "Raises `ugds.Error`: EEXIST (overlaps a registered buffer), EINVAL (empty, not contiguous), EFAULT, EOPNOTSUPP\n"
      "(managed memory, a route that cannot be had), ENODEV (a GPU that UGDS_GPUS leaves out); TypeError for an "
      "object\n"
      "without memory. Thread-safe.");
  m.def(
      "register_dmabuf",
      [](int descriptor, nb::object size, nb::object offset, std::optional<std::vector<nb::object>> devices,
         bool readonly) {
        collect_retired();
        const std::uint64_t bytes = size_argument(size, "size", "register_dmabuf");
        const std::uint64_t at = size_argument(offset, "offset", "register_dmabuf");
        if (bytes == 0 || (bytes | at) % nvme::kPageSize != 0) {
          raise_new(EINVAL, "register_dmabuf", "size and offset are not multiples of 4096 bytes, or there are no bytes",
                    "round them");
        }
        const auto numbers = numbers_of(devices);
        auto peer = std::make_unique<Peer>(descriptor, bytes);
        Memory memory{.address = peer->address(), .size = bytes, .readonly = readonly, .kind = memory::Kind::peer};
        memory.peer = {peer->descriptor(), at};
        memory.keeper = std::move(peer);
        return add(std::move(memory), nb::none(), numbers);
      },
      nb::arg("fd"), nb::arg("size"), nb::arg("offset") = 0, nb::arg("devices") = nb::none(), nb::kw_only(),
      nb::arg("readonly") = false,
      "Registers memory of another device, which exports it as a DMA-BUF: the SSD reaches it peer to peer.\n\n"
      "fd: the DMA-BUF's descriptor, which is duplicated. size, offset: bytes of it, multiples of 4096 (ints, or text "
      "such\n"
      "as \"64MiB\"). The processor does not reach the memory by this registration: no buffer protocol, and requests "
      "in\n"
      "whole blocks only. Its exporter may revoke it, when it is reset for one: transfers then fail, or are dropped "
      "by the\n"
      "IOMMU.\n\n"
      "Raises `ugds.Error`: EINVAL, EBADF (no descriptor), EOPNOTSUPP (no open device can import it), and what the "
      "kernel\n"
      "says of the import. Thread-safe.");
  m.def(
      "empty",
      [](nb::object size) {
        collect_retired();
        auto ours = std::make_unique<Ours>(size_argument(size, "size", "empty"));
        Memory memory{.address = ours->memory.data(), .size = ours->memory.size()};
        memory.keeper = std::move(ours);
        return add(std::move(memory), nb::none(), {});
      },
      nb::arg("size"),
      "Registered host memory of `size` bytes (an int, or text such as \"64MiB\"), zeroed and page-aligned, in huge "
      "pages\n"
      "where there are some. Every transport can reach it. Use it through the buffer protocol:\n"
      "`numpy.frombuffer(buf, dtype)`. A child of `fork` does not have it: touching it there ends the child. Raises "
      "`ugds.Error`: ENOMEM, EINVAL. Thread-safe.");
}

}  // namespace ugds::python
