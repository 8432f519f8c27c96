// SPDX-License-Identifier: Apache-2.0
//
// UGDS_GPUS: the GPUs that may be used, by number, such as "0,2". Without it all may.
#pragma once

namespace ugds::gpu {

bool is_visible(int device);
/// Throws Failure(ENODEV) for a GPU that is not among them.
void require_visible(int device);

}  // namespace ugds::gpu
