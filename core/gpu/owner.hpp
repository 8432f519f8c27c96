// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ugds::gpu {

/// Whether the address is one that CUDA knows. Without cuInit, which takes long and is not ours to make in a process
/// that does not use the GPU.
bool is_cuda_memory(const void* address);

}  // namespace ugds::gpu
