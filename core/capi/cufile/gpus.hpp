// SPDX-License-Identifier: Apache-2.0
//
// What CUDA, NVML and the system say of GPUs, for statistics and cuFileGetBARSizeInKB. All of it is asked at once, and
// kept.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ugds::cufile {

/// How many GPUs the program may use; 0 where there is no CUDA.
int gpu_count();
/// The 16 bytes of a GPU's UUID; zeros where it is not known.
void gpu_uuid(int gpu, char (&uuid)[16]);
/// Bytes of the window through which others reach a GPU's memory; 0 where nobody says.
std::uint64_t gpu_window(int gpu);

}  // namespace ugds::cufile
