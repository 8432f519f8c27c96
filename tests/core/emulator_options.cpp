// SPDX-License-Identifier: Apache-2.0
#include "emulator_host.hpp"

using namespace emulator_test;

namespace {

std::string refusal(const std::string& uri) {
  try {
    parse(uri);
  } catch (const Failure& f) {
    CHECK(f.error().code == EINVAL);
    return cause_of(f);
  }
  return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("options: every parameter lands in its field") {
  const Options o = parse(
      "1GiB?lba=512&metadata=8&interleaved=1&namespaces=2&vwc=0&mdts=7&queues=3&depth=65536&stride=2&mpsmin=1&mpsmax=3&"
      "timeout=9&contiguous=0&shadow=0&doorbells=trapped&dsm=no&zeroes=off&enabled=true&ready=5ms&serial=A&model=B&"
      "firmware=C&latency=20us&bandwidth=5.5GiB/s&iops=1000&order=random&seed=42&clock=virtual&pump=caller&idle=1ms&"
      "name=n&vectors=5&notify=adaptive&slots=65536&burst=1");
  CHECK(o.size == 1_GiB);
  CHECK(o.lba == 512);
  CHECK(o.metadata == 8);
  CHECK(o.interleaved);
  CHECK(o.namespaces == 2);
  CHECK_FALSE(o.vwc);
  CHECK(o.mdts == 7);
  CHECK(o.queues == 3);
  CHECK(o.depth == 65536);
  CHECK(o.stride == 2);
  CHECK(o.mpsmin == 1);
  CHECK(o.mpsmax == 3);
  CHECK(o.timeout == 9);
  CHECK_FALSE(o.contiguous);
  CHECK_FALSE(o.shadow);
  CHECK(o.trapped);
  CHECK_FALSE(o.dsm);
  CHECK_FALSE(o.zeroes);
  CHECK(o.initially_enabled);
  CHECK(o.ready_ns == 5'000'000);
  CHECK(o.serial == "A");
  CHECK(o.model == "B");
  CHECK(o.firmware == "C");
  CHECK(o.latency_ns == 20'000);
  CHECK(o.bandwidth == 5'905'580'032u);
  CHECK(o.iops == 1000);
  CHECK(o.order == emulator::Order::random);
  CHECK(o.seed == 42);
  CHECK(o.virtual_clock);
  CHECK(o.pump_by_caller);
  CHECK(o.idle_ns == 1'000'000);
  CHECK(o.slots == 65536);
  CHECK(o.burst == 1);
  CHECK(o.name == "n");
  CHECK(o.vector_count() == 5);
  CHECK(o.interrupts == emulator::Interrupts::adaptive);
}

TEST_CASE("options: the place is a size, a path, or an error that says so") {
  CHECK(parse("64MiB").size == 64_MiB);
  CHECK(parse("/data/image").path == "/data/image");
  CHECK(parse("./image?size=1MiB").path == "./image");
  CHECK(parse("./image?size=1MiB").size == 1_MiB);
  CHECK(parse("?size=1MiB").size == 1_MiB);
  CHECK(parse("1MiB?file=image").path == "image");
  CHECK(has(refusal("image"), "neither a size nor a path"));
  CHECK(has(refusal(""), "no size"));
  CHECK(has(refusal("1MiB?size=2MiB"), "twice"));
}

TEST_CASE("options: a refusal names the parameter, the value and what is accepted") {
  CHECK(has(refusal("1MiB?lba=513"), "lba=513"));
  CHECK(has(refusal("1MiB?lba=513"), "512 to 65536"));
  CHECK(has(refusal("1MiB?queues=65535"), "65534"));
  CHECK(has(refusal("1MiB?depth=1"), "2 to 65536"));
  CHECK(has(refusal("1MiB?slots=65537"), "slots"));
  CHECK(has(refusal("1MiB?burst=0"), "1 to 64"));
  CHECK(has(refusal("1MiB?burst=65"), "1 to 64"));
  CHECK(has(refusal("1MiB?order=backwards"), "fifo, reverse or random"));
  CHECK(has(refusal("1MiB?latency=5"), "latency"));
  CHECK(has(refusal("1MiB?doorbells=loud"), "mapped or trapped"));
  CHECK(has(refusal("1MiB?vwc=maybe"), "vwc"));
  CHECK(has(refusal("1MiB?interleaved=1"), "metadata"));
  CHECK(has(refusal("1MiB?mpsmin=2&mpsmax=1"), "mpsmin=2"));
  CHECK(has(refusal("5000"), "multiple"));
  CHECK(has(refusal("1MiB?stride=15&queues=65534"), "4 GiB"));
  CHECK(has(refusal("1MiB?serial=123456789012345678901"), "20"));
  CHECK(has(refusal("1MiB?latencey=5us"), "did you mean \"latency\""));
  CHECK(has(refusal("1MiB?xyzzyx=5"), "docs/emulator.md"));
}

TEST_CASE("options: the table names each parameter once, and the parser knows no other") {
  for (const auto& p : emulator::parameters()) {
    CAPTURE(p.name);
    CHECK(std::string(p.values) != "");
    CHECK(std::string(p.meaning) != "");
    int times = 0;
    for (const auto& other : emulator::parameters()) times += std::string(other.name) == p.name;
    CHECK(times == 1);
    CHECK_FALSE(has(refusal("1MiB?" + std::string(p.name) + "=%00x"), "no parameter"));
  }
}
