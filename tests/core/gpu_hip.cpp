// SPDX-License-Identifier: Apache-2.0
//
// HIP against a stand-in of AMD's libraries: what it says of memory, and that nothing of the caller's thread changes.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "gpu/hip.hpp"
#include "gpu_fake_hip.hpp"

using namespace ugds;
using namespace ugds::gpu;
using namespace gpu_test;

namespace {

constexpr std::uint64_t kMiB = 1 << 20;

struct Hip {
  FakeHip& fake = fake_hip_library();
  std::unique_ptr<HipRuntime> runtime = open_hip();
  Place place = runtime->place_of(0);

  Address allocate(std::size_t bytes, int device = 0) {
    return reinterpret_cast<Address>(fake.allocate(bytes, device));
  }
  void free(Address address) { fake.free(reinterpret_cast<void*>(address)); }
};

std::string why_not() {
  std::string why;
  CHECK(HipRuntime::open(why) == nullptr);
  return why;
}

std::vector<unsigned char> pattern(std::size_t bytes, unsigned seed) {
  std::vector<unsigned char> data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<unsigned char>(seed + i * 7 + i / 256);
  return data;
}

}  // namespace

// --- Opening

TEST_CASE("hip: the process's runtime is there once its library is named") {
  fake_hip_library();
  std::string why = "untouched";
  Runtime* runtime = hip(&why);
  REQUIRE(runtime != nullptr);
  CHECK(hip() == runtime);
  CHECK(why == "untouched");
  CHECK(runtime->backend() == Backend::hip);
  CHECK(std::string(runtime->name()) == "hip");
  CHECK(runtime->driver() == "HIP 6.3.42134");
  CHECK(runtime->device_count() == 2);
  CHECK(runtime->device_name(1) == "Fake 1");
}

TEST_CASE("hip: what is missing is said") {
  FakeHip& fake = fake_hip_library();
  {
    Variable library("UGDS_HIP_LIBRARY", "/nowhere/libamdhip64.so");
    CHECK(holds(why_not(), "/nowhere/libamdhip64.so"));
    CHECK(holds(why_not(), "UGDS_HIP_LIBRARY"));
  }
  {
    Variable library("UGDS_HIP_LIBRARY", "libm.so.6");
    CHECK(holds(why_not(), "hipInit"));
  }
  fake.fail("hipInit", 1, 100);
  CHECK(holds(why_not(), "hipInit failed: hipErrorNoDevice (100): no ROCm-capable device is detected"));
  fake.fail("hipRuntimeGetVersion", 1, 1);
  CHECK(holds(why_not(), "hipRuntimeGetVersion failed"));
  fake.set_version(50731921);
  CHECK(holds(why_not(), "HIP 5.7.31921 is too old"));
  fake.reset();
  fake.fail("hipGetDeviceCount", 1, 100);
  CHECK(holds(why_not(), "hipGetDeviceCount failed"));
  fake.set_devices(0);
  CHECK(holds(why_not(), "no GPU"));
}

TEST_CASE("hip: UGDS_GPUS names the GPUs that may be used") {
  FakeHip& fake = fake_hip_library();
  {
    Variable gpus("UGDS_GPUS", "1,1");
    const auto runtime = open_hip();
    CHECK(runtime->device_count() == 1);
    CHECK(runtime->place_of(1) == Place{1, nullptr});
    CHECK(error_of([&] { runtime->place_of(0); }).code == ENODEV);
    CHECK(error_of([&] { runtime->device_name(0); }).code == ENODEV);
    void* other = fake.allocate(kMiB, 0);
    const Error error = error_of([&] { runtime->find(reinterpret_cast<Address>(other)); });
    CHECK(error.code == ENODEV);
    CHECK(holds(error.message(), "UGDS_GPUS"));
    fake.free(other);
  }
  for (const char* bad : {"0,2", "0;1", "x", "0,", "-1", "1 "}) {
    Variable gpus("UGDS_GPUS", bad);
    CHECK_MESSAGE(holds(why_not(), "UGDS_GPUS"), bad);
  }
}

TEST_CASE("hip: a code in words, also one without a name") {
  Hip hip;
  CHECK(hip.runtime->words(1) == "hipErrorInvalidValue (1): invalid argument");
  CHECK(hip.runtime->words(4711) == "an unknown error (4711)");
  hip.fake.fail("hipDeviceGetName", 1, 1);
  CHECK(error_of([&] { hip.runtime->device_name(0); }).code == EINVAL);
}

// --- Memory

TEST_CASE("hip: an address anywhere inside GPU memory finds its allocation") {
  Hip hip;
  const Address base = hip.allocate(3 * kMiB + 5, 1);
  const Address other = hip.allocate(kMiB);
  const auto first = hip.runtime->find(base);
  REQUIRE(first);
  CHECK(first->base == base);
  CHECK(first->size == 3 * kMiB + 5);
  CHECK(first->place == Place{1, nullptr});
  CHECK(first->id != 0);
  CHECK(first->id < (std::uint64_t{1} << 32));  // the library writes 4 bytes
  const auto last = hip.runtime->find(base + 3 * kMiB + 4);
  REQUIRE(last);
  CHECK(last->base == base);
  CHECK(last->id == first->id);
  CHECK(hip.runtime->find(other)->id != first->id);
  hip.free(base);
  hip.free(other);
}

TEST_CASE("hip: host memory is none, pinned or not, and managed memory is refused") {
  Hip hip;
  std::vector<char> host(8192);
  CHECK_FALSE(hip.runtime->find(reinterpret_cast<Address>(host.data())));
  const Word word = hip.runtime->make_word();
  CHECK_FALSE(hip.runtime->find(word.device));
  hip.runtime->free_word(word);
  hip.fake.fail("hipPointerGetAttributes", 1, 1);
  CHECK_FALSE(hip.runtime->find(reinterpret_cast<Address>(host.data())));
  CHECK(hip.fake.last_error() == 0);

  void* managed = hip.fake.allocate_managed(kMiB);
  const Error error = error_of([&] { hip.runtime->find(reinterpret_cast<Address>(managed)); });
  CHECK(error.code == EOPNOTSUPP);
  CHECK(holds(error.message(), "hipMalloc"));
  hip.fake.free(managed);
}

TEST_CASE("hip: an error while memory is looked up is one, not host memory") {
  Hip hip;
  const Address base = hip.allocate(kMiB);
  hip.fake.fail("hipPointerGetAttributes", 1, 2);
  CHECK(error_of([&] { hip.runtime->find(base); }).code == ENOMEM);
  hip.fake.fail("hipMemGetAddressRange", 1, 101);
  CHECK(error_of([&] { hip.runtime->find(base); }).code == ENODEV);
  hip.fake.fail("hipPointerGetAttribute", 1, 801);
  CHECK(hip.runtime->find(base)->id == 0);
  hip.free(base);
}

TEST_CASE("hip: memory is alive until it is freed, also where another lies there then") {
  Hip hip;
  const Address base = hip.allocate(kMiB);
  const Allocation there = *hip.runtime->find(base);
  CHECK(hip.runtime->is_alive(there, base));
  CHECK(hip.runtime->is_alive(there, base + kMiB - 1));
  Allocation changed = there;
  changed.id += 1;
  CHECK_FALSE(hip.runtime->is_alive(changed, base));
  changed = there;
  changed.size -= 1;
  CHECK_FALSE(hip.runtime->is_alive(changed, base));
  changed = there;
  changed.base += 4096;
  CHECK_FALSE(hip.runtime->is_alive(changed, base));
  changed = there;
  changed.place.device = 1;
  CHECK_FALSE(hip.runtime->is_alive(changed, base));
  changed = there;
  changed.id = 0;  // the runtime has no number
  CHECK(hip.runtime->is_alive(changed, base));
  for (const char* function : {"hipPointerGetAttributes", "hipMemGetAddressRange", "hipPointerGetAttribute"}) {
    hip.fake.fail(function, 1, 1);
    CHECK_FALSE_MESSAGE(hip.runtime->is_alive(there, base), function);
  }
  CHECK(hip.runtime->is_alive(there, base));
  hip.free(base);
  CHECK_FALSE(hip.runtime->is_alive(there, base));
  CHECK(hip.fake.last_error() == 0);
}

TEST_CASE("hip: pinned memory has the address that kernels use, and can be pinned once") {
  Hip hip;
  std::vector<char> host(8192);
  const Address device = hip.runtime->pin(host.data(), host.size());
  CHECK(device == reinterpret_cast<Address>(host.data()) + (Address{1} << 48));
  const Error error = error_of([&] { hip.runtime->pin(host.data() + 4096, 4096); });
  CHECK(error.code == EBUSY);
  CHECK(holds(error.message(), "hipHostRegister failed: an unknown error (712)"));
  hip.runtime->unpin(host.data());
  CHECK(hip.fake.live_pins() == 0);
  hip.fake.fail("hipHostGetDevicePointer", 1, 1);
  CHECK(error_of([&] { hip.runtime->pin(host.data(), host.size()); }).code == EINVAL);
  CHECK(hip.fake.live_pins() == 0);
}

TEST_CASE("hip: a word is 0 at first, on a line of its own, and kept for the next one made") {
  const int before = fake_hip_library().live_allocations();
  {
    Hip hip;
    const Word a = hip.runtime->make_word(), b = hip.runtime->make_word();
    CHECK(a.host->load() == 0);
    CHECK(reinterpret_cast<Address>(a.host) == a.device);
    CHECK(a.device / 64 != b.device / 64);
    CHECK(hip.fake.live_allocations() == before + 2);
    hip.runtime->free_word(Word{});
    b.host->store(5);
    hip.runtime->free_word(b);
    const Word again = hip.runtime->make_word();
    CHECK(again.device == b.device);
    CHECK(again.host->load() == 0);
    CHECK(hip.fake.calls("hipExtMallocWithFlags") == 2);
    hip.fake.fail("hipExtMallocWithFlags", 1, 2);
    CHECK(error_of([&] { hip.runtime->make_word(); }).code == ENOMEM);
    hip.runtime->free_word(a);
    hip.runtime->free_word(again);
  }
  CHECK(fake_hip_library().live_allocations() == before);
}

TEST_CASE("hip: a word is given back while a stream waits for another") {
  Hip hip;
  const Word waited = hip.runtime->make_word(), other = hip.runtime->make_word();
  const StreamHandle stream = hip.runtime->make_stream(hip.place);
  const WordOp wait[] = {{WordOp::Kind::wait, waited.device, 1}};
  CHECK(hip.runtime->enqueue_words(hip.place, stream, wait) == 0);
  hip.runtime->free_word(other);  // hipFree would never return
  CHECK(hip.fake.calls("hipFree") == 0);
  waited.host->store(1, std::memory_order_release);
  hip.runtime->destroy_stream(hip.place, stream);
  hip.runtime->free_word(waited);
}

// --- Streams

TEST_CASE("hip: a stream keeps order, waits for a word and writes another") {
  Hip hip;
  const StreamHandle stream = hip.runtime->make_stream(hip.place);
  const Word arrived = hip.runtime->make_word(), done = hip.runtime->make_word();
  const Address memory = hip.allocate(kMiB);
  const auto sent = pattern(65536, 3);
  std::vector<unsigned char> back(65536);
  const WordOp ops[] = {{WordOp::Kind::write, arrived.device, 7}, {WordOp::Kind::wait, done.device, 5}};
  CHECK(hip.runtime->enqueue_words(hip.place, stream, ops) == 0);
  CHECK(hip.runtime->enqueue_to_device(hip.place, stream, memory + 100, sent.data(), sent.size()) == 0);
  CHECK(hip.runtime->enqueue_from_device(hip.place, stream, back.data(), memory + 100, back.size()) == 0);
  while (arrived.host->load(std::memory_order_acquire) != 7) std::this_thread::yield();
  done.host->store(4, std::memory_order_release);  // not enough
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  unsigned char first = 1;
  hip.fake.read(memory + 100, &first, 1);
  CHECK(first == 0);
  done.host->store(6, std::memory_order_release);  // beyond is as good
  CHECK(hip.runtime->synchronize(hip.place, stream) == 0);
  CHECK(back == sent);
  hip.runtime->destroy_stream(hip.place, stream);
  hip.runtime->free_word(arrived);
  hip.runtime->free_word(done);
  hip.free(memory);
}

TEST_CASE("hip: what a stream cannot do is refused before it is enqueued") {
  Hip hip;
  const StreamHandle stream = hip.runtime->make_stream(hip.place);
  const Word word = hip.runtime->make_word();
  const Address memory = hip.allocate(kMiB);
  // Streams wait on signal memory alone.
  const WordOp elsewhere[] = {{WordOp::Kind::wait, memory, 1}};
  CHECK(hip.runtime->enqueue_words(hip.place, stream, elsewhere) == 1);
  const WordOp negative[] = {{WordOp::Kind::wait, word.device, std::uint64_t{1} << 63}};
  CHECK(hip.runtime->enqueue_words(hip.place, stream, negative) == 1);
  CHECK(hip.fake.calls("hipStreamWaitValue64") == 1);
  // The first that fails is the last that is tried.
  const WordOp three[] = {{WordOp::Kind::write, word.device, 1},
                          {WordOp::Kind::write, word.device, 2},
                          {WordOp::Kind::write, word.device, 3}};
  hip.fake.fail("hipStreamWriteValue64", 2, 2);
  CHECK(hip.runtime->enqueue_words(hip.place, stream, three) == 2);
  CHECK(hip.runtime->synchronize(hip.place, stream) == 0);
  CHECK(word.host->load() == 1);

  char byte = 0;
  CHECK(hip.runtime->enqueue_to_device(hip.place, stream, memory + kMiB, &byte, 1) == 1);
  CHECK(hip.runtime->enqueue_from_device(hip.place, stream, &byte, memory, kMiB + 1) == 1);
  CHECK(hip.runtime->enqueue_copies(hip.place, stream, word.device, 1, 8) == 801);
  CHECK(hip.runtime->enqueue_call(hip.place, stream, nullptr, nullptr) == 1);
  CHECK(hip.fake.last_error() == 0);
  hip.runtime->destroy_stream(hip.place, stream);
  CHECK(hip.runtime->synchronize(hip.place, stream) == 400);
  hip.runtime->free_word(word);
  hip.free(memory);
}

TEST_CASE("hip: a function is called in stream order, and may call nothing of the runtime") {
  Hip hip;
  struct Seen {
    HipRuntime& runtime;
    std::atomic<int> code{-1};
    std::thread::id thread{};
  } seen{*hip.runtime};
  const StreamHandle stream = hip.runtime->make_stream(hip.place);
  const auto function = [](void* context) {
    auto& mine = *static_cast<Seen*>(context);
    mine.thread = std::this_thread::get_id();
    mine.code = mine.runtime.synchronize(Place{0, nullptr}, nullptr);
  };
  CHECK(hip.runtime->enqueue_call(hip.place, stream, function, &seen) == 0);
  CHECK(hip.runtime->synchronize(hip.place, stream) == 0);
  CHECK(seen.code == 999);
  CHECK(seen.thread != std::this_thread::get_id());
  hip.runtime->destroy_stream(hip.place, stream);
}

TEST_CASE("hip: captures are seen, also those that the null stream would touch") {
  Hip hip;
  const StreamHandle stream = hip.runtime->make_stream(hip.place);
  bool capturing = true;
  CHECK(hip.runtime->is_capturing(hip.place, stream, capturing) == 0);
  CHECK_FALSE(capturing);
  for (const int status : {1, 2}) {
    hip.fake.set_capture(stream, status);
    CHECK(hip.runtime->is_capturing(hip.place, stream, capturing) == 0);
    CHECK(capturing);
  }
  hip.fake.set_capture(stream, 0);
  capturing = false;
  hip.fake.fail("hipStreamIsCapturing", 1, 906);
  CHECK(hip.runtime->is_capturing(hip.place, nullptr, capturing) == 0);
  CHECK(capturing);
  hip.fake.fail("hipStreamIsCapturing", 1, 400);
  CHECK(hip.runtime->is_capturing(hip.place, stream, capturing) == 400);
  CHECK_FALSE(capturing);
  hip.runtime->destroy_stream(hip.place, stream);
}

TEST_CASE("hip: streams are made on their GPU and destroyed") {
  Hip hip;
  const int before = hip.fake.live_streams();
  const StreamHandle stream = hip.runtime->make_stream(Place{1, nullptr});
  CHECK(hip.fake.live_streams() == before + 1);
  hip.runtime->destroy_stream(Place{1, nullptr}, stream);
  CHECK(hip.fake.live_streams() == before);
  hip.fake.fail("hipStreamCreateWithFlags", 1, 2);
  CHECK(error_of([&] { hip.runtime->make_stream(hip.place); }).code == ENOMEM);
  hip.fake.fail("hipSetDevice", 1, 101);
  CHECK(error_of([&] { hip.runtime->make_stream(Place{1, nullptr}); }).code == ENODEV);
}

TEST_CASE("hip: whether a GPU has words, and how many streams may wait") {
  Hip hip;
  CHECK(hip.runtime->has_words(0));
  CHECK_FALSE(hip.runtime->has_words(9));
  hip.fake.set_can_wait(false);
  CHECK_FALSE(hip.runtime->has_words(0));
  {
    Variable queues("GPU_MAX_HW_QUEUES", nullptr);
    CHECK(hip.runtime->connections(0) == 4);
  }
  for (const auto& [text, queues] : {std::pair("7", 7), {"0", 4}, {"x", 4}, {"-2", 4}}) {
    Variable variable("GPU_MAX_HW_QUEUES", text);
    CHECK(hip.runtime->connections(0) == queues);
  }
}

TEST_CASE("hip: there is no copy kernel, and that is said with what to do") {
  Hip hip;
  const Error error = error_of([&] { hip.runtime->load_kernels(hip.place); });
  CHECK(error.code == EOPNOTSUPP);
  CHECK(holds(error.message(), "late-bound requests that are staged are not there for HIP"));
}

// --- Copies in the calling thread

TEST_CASE("hip: a copy in the calling thread waits for no other stream") {
  Hip hip;
  const Word word = hip.runtime->make_word();
  const StreamHandle waiting = hip.runtime->make_stream(hip.place);
  const WordOp wait[] = {{WordOp::Kind::wait, word.device, 1}};
  CHECK(hip.runtime->enqueue_words(hip.place, waiting, wait) == 0);
  const Address memory = hip.allocate(kMiB);
  const auto sent = pattern(kMiB, 9);
  std::vector<unsigned char> back(kMiB);
  CHECK(hip.runtime->copy_to_device(hip.place, memory, sent.data(), kMiB) == 0);
  hip.fake.read(memory, back.data(), kMiB);
  CHECK(back == sent);
  std::fill(back.begin(), back.end(), 0);
  CHECK(hip.runtime->copy_from_device(hip.place, back.data() + 1, memory + 1, kMiB - 1) == 0);
  CHECK(std::memcmp(back.data() + 1, sent.data() + 1, kMiB - 1) == 0);
  word.host->store(1, std::memory_order_release);
  hip.runtime->destroy_stream(hip.place, waiting);
  hip.runtime->free_word(word);
  hip.free(memory);
}

TEST_CASE("hip: the streams of such copies are kept for the next, and destroyed with the runtime") {
  const int before = fake_hip_library().live_streams();
  {
    Hip hip;
    const Address memory = hip.allocate(kMiB);
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 12; ++t) {
      threads.emplace_back([&, t] {
        const auto sent = pattern(4096, t);
        std::vector<unsigned char> back(4096);
        for (int round = 0; round < 20; ++round) {
          CHECK(hip.runtime->copy_to_device(hip.place, memory + t * 4096, sent.data(), 4096) == 0);
          CHECK(hip.runtime->copy_from_device(hip.place, back.data(), memory + t * 4096, 4096) == 0);
          CHECK(back == sent);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(hip.fake.live_streams() - before >= 1);
    CHECK(hip.fake.live_streams() - before <= 8);
    hip.free(memory);
  }
  CHECK(fake_hip_library().live_streams() == before);
}

TEST_CASE("hip: a copy that fails gives the code, and leaves no stream behind") {
  Hip hip;
  const int before = hip.fake.live_streams();
  const Address memory = hip.allocate(4096);
  char byte = 0;
  hip.fake.fail("hipStreamCreateWithFlags", 1, 2);
  CHECK(hip.runtime->copy_to_device(hip.place, memory, &byte, 1) == 2);
  CHECK(hip.runtime->copy_to_device(hip.place, memory + 4096, &byte, 1) == 1);
  hip.fake.fail("hipStreamSynchronize", 1, 700);
  CHECK(hip.runtime->copy_from_device(hip.place, &byte, memory, 1) == 700);
  hip.fake.fail("hipGetDevice", 1, 3);
  CHECK(hip.runtime->copy_from_device(hip.place, &byte, memory, 1) == 3);
  CHECK(hip.fake.live_streams() == before + 1);
  CHECK(hip.fake.last_error() == 0);
  hip.free(memory);
}

TEST_CASE("hip: every call for a request says when its GPU cannot be made current") {
  Hip hip;
  const Place other{1, nullptr};
  bool capturing = false;
  char byte = 0;
  const WordOp none[] = {{WordOp::Kind::write, 8, 1}};
  const auto fails = [&](auto request) {
    hip.fake.fail("hipSetDevice", 1, 101);
    return request() == 101;
  };
  CHECK(fails([&] { return hip.runtime->enqueue_words(other, nullptr, none); }));
  CHECK(fails([&] { return hip.runtime->enqueue_to_device(other, nullptr, 8, &byte, 1); }));
  CHECK(fails([&] { return hip.runtime->enqueue_from_device(other, nullptr, &byte, 8, 1); }));
  CHECK(fails([&] {
    return hip.runtime->enqueue_call(
        other, nullptr, [](void*) {}, nullptr);
  }));
  CHECK(fails([&] { return hip.runtime->is_capturing(other, nullptr, capturing); }));
  CHECK(fails([&] { return hip.runtime->synchronize(other, nullptr); }));
  CHECK(fails([&] { return hip.runtime->copy_to_device(other, 8, &byte, 1); }));
  CHECK(hip.fake.last_error() == 0);
}

TEST_CASE("hip: the caller's GPU, capture mode and last error stay as they were") {
  Hip hip;
  const Place other{1, nullptr};
  const Address memory = hip.allocate(kMiB, 1);
  char byte = 5;
  CHECK(hip.runtime->copy_to_device(other, memory, &byte, 1) == 0);
  CHECK(hip.runtime->copy_to_device(other, memory + kMiB, &byte, 1) == 1);
  CHECK(hip.fake.current_device() == 0);
  CHECK(hip.fake.capture_mode() == 0);
  CHECK(hip.fake.last_error() == 0);
  // One of the program's own is not taken away.
  const auto attributes = reinterpret_cast<int (*)(void*, const void*)>(
      dlsym(dlopen(UGDS_FAKE_HIP, RTLD_NOW | RTLD_LOCAL), "hipPointerGetAttributes"));
  CHECK(attributes(nullptr, nullptr) == 1);
  CHECK(hip.runtime->synchronize(other, nullptr) == 0);
  CHECK(hip.runtime->copy_to_device(other, memory + kMiB, &byte, 1) == 1);
  CHECK(hip.fake.last_error() == 1);
  hip.free(memory);
}
