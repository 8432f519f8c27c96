// SPDX-License-Identifier: GPL-2.0-only
/* The requests that this kernel, or this build, has nothing for. */
#include "internal.h"

#if !IS_ENABLED(CONFIG_DMA_SHARED_BUFFER)
int ugds_request_map_dmabuf(struct ugds_file *file, void *request, u32 *reason,
			    struct ugds_mapping **made)
{
	*reason = UGDS_DRV_REASON_NOT_BUILT;
	return -EOPNOTSUPP;
}
#endif

#ifndef UGDS_DRV_NVIDIA
int ugds_request_map_nvidia(struct ugds_file *file, void *request, u32 *reason,
			    struct ugds_mapping **made)
{
	*reason = UGDS_DRV_REASON_NOT_BUILT;
	return -EOPNOTSUPP;
}
#endif
