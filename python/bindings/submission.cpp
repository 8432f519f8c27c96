// SPDX-License-Identifier: Apache-2.0
//
// Batch.read and write: arguments are read where they lie, and go down in one run of instructions.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>

#include "arguments.hpp"
#include "batch.hpp"
#include "columns.hpp"

namespace ugds::python {

namespace {

using engine::Batch;
using engine::Table;
using engine::Wanted;
using nvme::Opcode;

/// Requests that are staged with the interpreter lock: some ten microseconds' worth.
constexpr std::size_t kWithLock = 512;
/// Results that are collected at once while room is made.
constexpr std::size_t kPortion = 4096;
constexpr auto kNever = [](std::size_t) { return false; };

/// Requests of one buffer, with cookies in a row. To be copied.
struct Plain {
  static constexpr bool kOffsetsTell = false;
  const memory::Reference* memory;
  const std::uint64_t *offsets, *sizes, *places;
  std::size_t offset_mask, size_mask, place_mask;
  std::uint64_t base, cookie;
  std::uint64_t write;
  bool durable;

  const memory::Reference& begin_run(std::size_t) const { return *memory; }
  const memory::Reference& buffer() const { return *memory; }
  bool same_buffer(std::size_t) const { return true; }
  [[gnu::always_inline]] Wanted operator()(std::size_t i) const {
    return {.offset = offsets[i & offset_mask],
            .size = sizes[i & size_mask],
            .buffer_offset = base + places[i & place_mask],
            .cookie = cookie + i,
            .write = write,
            .durable = durable};
  }
};

/// The same of one size, with an offset and a place for each.
struct Uniform {
  static constexpr bool kOffsetsTell = false;
  const memory::Reference* memory;
  const std::uint64_t *offsets, *places;
  std::uint64_t size, base, cookie, write;
  bool durable;

  const memory::Reference& begin_run(std::size_t) const { return *memory; }
  const memory::Reference& buffer() const { return *memory; }
  bool same_buffer(std::size_t) const { return true; }
  [[gnu::always_inline]] Wanted operator()(std::size_t i) const {
    return {.offset = offsets[i],
            .size = size,
            .buffer_offset = base + places[i],
            .cookie = cookie + i,
            .write = write,
            .durable = durable};
  }
};

/// Any others.
struct General {
  static constexpr bool kOffsetsTell = false;
  const Plain* plain;
  const Buffers* buffers;
  const std::uint64_t* versions;  ///< of the buffers, where they are a list
  const Column* cookies;
  std::size_t run = 0;

  std::size_t index(std::size_t i) const { return buffers->size() == 1 ? 0 : i; }
  const memory::Reference& begin_run(std::size_t i) {
    run = index(i);
    return buffer();
  }
  const memory::Reference& buffer() const { return versions != nullptr ? (*buffers)[run].buffer : plain->buffer(); }
  bool same_buffer(std::size_t i) const { return versions == nullptr || versions[index(i)] == versions[run]; }
  Wanted operator()(std::size_t i) const {
    Wanted wanted = (*plain)(i);
    if (versions != nullptr) wanted.buffer_offset += (*buffers)[i].offset;
    if (cookies != nullptr) wanted.cookie = (*cookies)[i];
    return wanted;
  }
};

/// The same from some request on.
template <class All>
struct From {
  static constexpr bool kOffsetsTell = All::kOffsetsTell;
  All all;
  std::size_t first;

  const memory::Reference& begin_run(std::size_t i) { return all.begin_run(first + i); }
  const memory::Reference& buffer() const { return all.buffer(); }
  bool same_buffer(std::size_t i) const { return all.same_buffer(first + i); }
  [[gnu::always_inline]] Wanted operator()(std::size_t i) const { return all(first + i); }
};

/// Submits requests, and collects results where there is no capacity for the rest.
class Submission {
 public:
  Submission(PyBatch& self, engine::Handle& handle, Batch& batch, std::size_t count)
      : self_(self), handle_(handle), batch_(batch), count_(count) {}

  /// False: the batch was closed, or the caller was interrupted and an exception is set.
  template <class Get>
  [[gnu::flatten]] bool run(const Get& wanted) {
    if (count_ <= kWithLock && !handle_.rings_may_block()) [[likely]] {
      if (!submit(wanted)) return false;
      if (done_ == count_ && batch_.is_settled(self_.id.generation)) [[likely]]
        return true;
    }
    return run_without_lock(wanted);
  }
  std::size_t done() const { return done_; }

 private:
  template <class Get>
  [[gnu::always_inline]] bool submit(const Get& wanted) {
    const std::size_t first = done_;
    const std::int64_t taken =
        batch_.submit(self_.id.generation, count_ - first, false, From<Get>{wanted, first}, kNever);
    if (taken < 0) [[unlikely]]
      return false;
    done_ += static_cast<std::size_t>(taken);
    self_.taken.fetch_add(static_cast<std::uint64_t>(taken), std::memory_order_relaxed);
    return true;
  }
  template <class Get>
  [[gnu::cold, gnu::noinline]] bool run_without_lock(const Get& wanted) {
    return without_lock([&] {
      Results portion;
      bool interrupted = false;
      Context context{python_interrupt(), interrupted};
      for (;;) {
        if (!submit(wanted)) return false;
        if (done_ == count_) return batch_.settle(self_.id.generation, context.interrupt());
        const std::size_t most = std::min(kPortion, count_ - done_);
        portion.make_room(most);
        if (!self_.make_room(batch_, portion, most, context.interrupt()) || interrupted) return false;
      }
    });
  }
  /// Remembers that the caller was interrupted.
  struct Context {
    engine::Interrupt inner;
    bool& interrupted;
    engine::Interrupt interrupt() {
      return {[](void* self) {
                auto& context = *static_cast<Context*>(self);
                return context.interrupted = context.inner.asked(context.inner.context);
              },
              this};
    }
  };

  PyBatch& self_;
  engine::Handle& handle_;
  Batch& batch_;
  std::size_t count_, done_ = 0;
};

/// Neighbours in one registration share a number.
std::unique_ptr<std::uint64_t[]> number(const Buffers& buffers) {
  auto versions = std::make_unique_for_overwrite<std::uint64_t[]>(std::max<std::size_t>(1, buffers.size()));
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const memory::Reference& now = buffers[i].buffer;
    const memory::Reference& before = buffers[i == 0 ? 0 : i - 1].buffer;
    const bool same = now.registration == before.registration && now.generation == before.generation &&
                      now.readonly == before.readonly;
    versions[i] = i == 0 ? 1 : versions[i - 1] + (same ? 0 : 1);
  }
  return versions;
}

nb::object range_of(std::uint64_t first, std::uint64_t count) {
  const nb::int_ begin(first), end(first + count);
  PyObject* const arguments[] = {begin.ptr(), end.ptr()};
  nb::object range = nb::steal(PyObject_Vectorcall(reinterpret_cast<PyObject*>(&PyRange_Type), arguments, 2, nullptr));
  if (!range.is_valid()) throw nb::python_error();
  return range;
}

/// The cookies of a call, as its caller gets them.
nb::object cookies_of(const Column& cookies, std::size_t count) {
  if (cookies.is_array() && cookies.size() == count) return nb::borrow(cookies.object());
  if (count == 1) return range_of(cookies[0], 1);
  return nb::module_::import_("ugds._batch").attr("repeated")(cookies[0], count);
}

enum Argument { kBuffer, kOffsets, kSizes, kPlaces, kCookies, kDurable, kArguments };
constexpr const char* kNames[kArguments] = {"buffer", "offsets", "sizes", "buffer_offsets", "cookies", "durable"};
Names<kArguments>* names;

[[noreturn, gnu::cold]] void raise_submission(PyBatch& self, const char* operation) {
  check_interrupt();
  if (self.closed.load(std::memory_order_relaxed)) raise_closed(operation);
  raise_stale(self, operation);
}

template <Opcode opcode>
nb::object transfer(PyBatch& self, PyObject* const* a) {
  constexpr const char* name = opcode == Opcode::read ? "read" : "write";
  const auto given = [&](Argument i) { return a[i] != nullptr && a[i] != Py_None; };
  if (anything_retired()) [[unlikely]]
    collect_retired();
  if (a[kBuffer] == nullptr || a[kOffsets] == nullptr) throw nb::type_error("missing argument: buffer, offsets");
  const Buffers buffers(a[kBuffer], name);
  const Column offsets(a[kOffsets], "offsets", name);
  const auto optional = [&](Argument i) { return given(i) ? a[i] : nullptr; };
  Column sizes = Column::optional(optional(kSizes), "sizes", name);
  Column places = Column::optional(optional(kPlaces), "buffer_offsets", name);
  const Column cookies = Column::optional(optional(kCookies), "cookies", name);
  Length length(name);
  if (buffers.is_list()) length.add(buffers.size(), "buffer");
  length.add(offsets, "offsets");
  length.add(sizes, "sizes");
  length.add(places, "buffer_offsets");
  length.add(cookies, "cookies");
  const std::size_t count = length.get();
  complete_columns(sizes, given(kSizes), places, given(kPlaces), buffers, length, name);
  check_places(buffers, places, sizes, count, name);

  const Table::Use handle(Table::instance(), self.handle);
  Batch& batch = batch_of(self, handle, name);
  const std::uint64_t first = given(kCookies) ? 0 : self.next_cookie.fetch_add(count, std::memory_order_relaxed);
  const bool many = buffers.is_list() && count != 0;
  static const View none{};
  const View& view = many || count == 0 ? none : buffers[0];
  const Plain plain{.memory = &view.buffer,
                    .offsets = offsets.data(),
                    .sizes = sizes.data(),
                    .places = places.data(),
                    .offset_mask = offsets.mask(),
                    .size_mask = sizes.mask(),
                    .place_mask = places.mask(),
                    .base = view.offset,
                    .cookie = first,
                    .write = opcode == Opcode::write ? 1u : 0u,
                    .durable = opcode == Opcode::write && flag(a[kDurable])};
  Submission submission(self, *handle, batch, count);
  bool whole = true;
  if (!many && !given(kCookies)) [[likely]] {
    if (sizes.mask() == 0 && offsets.mask() != 0 && places.mask() != 0) {
      whole = submission.run(Uniform{.memory = plain.memory,
                                     .offsets = plain.offsets,
                                     .places = plain.places,
                                     .size = *plain.sizes,
                                     .base = plain.base,
                                     .cookie = plain.cookie,
                                     .write = plain.write,
                                     .durable = plain.durable});
    } else if (count != 0) {
      whole = submission.run(plain);
    }
  } else {
    const auto versions = many ? number(buffers) : nullptr;
    whole = submission.run(General{&plain, &buffers, versions.get(), given(kCookies) ? &cookies : nullptr});
  }
  if (!whole) [[unlikely]]
    raise_submission(self, name);
  return given(kCookies) ? cookies_of(cookies, count) : range_of(first, count);
}

template <Opcode opcode>
PyObject* method(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
  try {
    PyObject* arguments[kArguments] = {};
    names->parse(args, static_cast<std::size_t>(positional), keywords, opcode == Opcode::read ? kDurable : kArguments,
                 arguments);
    return transfer<opcode>(batch_self(self), arguments).release().ptr();
  } catch (...) {
    return translate(nb::inst_ptr<PyBatch>(self)->uri.c_str());
  }
}

}  // namespace

PyObject* batch_read(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
  return method<Opcode::read>(self, args, positional, keywords);
}

PyObject* batch_write(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
  return method<Opcode::write>(self, args, positional, keywords);
}

void define_submission() {
  names = new Names<kArguments>(kNames, kCookies + 1,
                                "buffer, offsets, sizes, buffer_offsets, cookies, and for write durable");
}

}  // namespace ugds::python
