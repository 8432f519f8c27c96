// SPDX-License-Identifier: Apache-2.0
//
// The C API on GPU memory and streams, where a C program could not see or bring about what is asked.
#include "engine_gpu_host.hpp"
#include "ugds.h"

using namespace gpu_test;

TEST_CASE("c-streams-again" * doctest::skip()) {
  // CUDA is there too, and is asked first.
  runtime();
  std::string why;
  gpu::Runtime* const hip = gpu::hip(&why);
  REQUIRE_MESSAGE(hip != nullptr, why);
  const gpu::Place place = hip->place_of(0);
  const gpu::StreamHandle stream = hip->make_stream(place);
  CHECK(uGDSStreamDeregister(stream).err == UGDS_INVALID_VALUE);
  REQUIRE(uGDSStreamRegisterEx(stream, 2).err == UGDS_SUCCESS);
  CHECK(uGDSStreamDeregister(stream).err == UGDS_SUCCESS);
  hip->destroy_stream(place, stream);
}

TEST_CASE("c streams: one of HIP is found where CUDA is present too") {
  CHECK(run_again("UGDS_HIP_LIBRARY=" UGDS_FAKE_HIP " UGDS_HSA_LIBRARY=" UGDS_FAKE_HIP, "c-streams-again") == 0);
}
