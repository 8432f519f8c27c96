// SPDX-License-Identifier: GPL-2.0-only
/*
 * GPU memory by the NVIDIA driver's peer-memory interface, for its versions
 * that export no DMA-BUF. Pages are asked for that persist: the driver keeps
 * them until they are given back here, whatever becomes of their process, so
 * nothing is ever taken from under a command.
 */
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "internal.h"
#include "nv-p2p.h"

struct gpu {
	struct ugds_mapping mapping;
	u64 address;
	struct nvidia_p2p_page_table *table;
	struct nvidia_p2p_dma_mapping *dma;
};

/* What a call without a callback gave once is a call of its own since. */
#ifdef NVIDIA_P2P_CAP_GET_PAGES_PERSISTENT_API
static int pin(struct gpu *gpu, u64 length)
{
	return nvidia_p2p_get_pages_persistent(gpu->address, length,
					       &gpu->table, 0);
}

static void unpin(struct gpu *gpu)
{
	nvidia_p2p_put_pages_persistent(gpu->address, gpu->table, 0);
}
#else
static int pin(struct gpu *gpu, u64 length)
{
	return nvidia_p2p_get_pages(0, 0, gpu->address, length, &gpu->table,
				    NULL, NULL);
}

static void unpin(struct gpu *gpu)
{
	nvidia_p2p_put_pages(0, 0, gpu->address, gpu->table);
}
#endif

/* Undoes whatever has been done. */
static void release(struct ugds_file *file, struct ugds_mapping *mapping)
{
	struct gpu *gpu = container_of(mapping, struct gpu, mapping);

	if (gpu->dma)
		nvidia_p2p_dma_unmap_pages(file->ud->pdev, gpu->table,
					   gpu->dma);
	ugds_forget_translations(file->ud);
	if (gpu->table)
		unpin(gpu);
	ugds_ledger_forget(file, mapping);
	kfree(gpu);
}

static const struct ugds_mapping_ops gpu_ops = {
	.release = release,
};

static int get(struct ugds_device *ud, struct gpu *gpu, u64 length, u32 *reason)
{
	int ret;

	*reason = UGDS_DRV_REASON_EXPORTER;
	ret = pin(gpu, length);
	if (ret) {
		gpu->table = NULL;
		return ret;
	}
	if (!NVIDIA_P2P_PAGE_TABLE_VERSION_COMPATIBLE(gpu->table))
		return -EPROTO;
	ret = nvidia_p2p_dma_map_pages(ud->pdev, gpu->table, &gpu->dma);
	if (ret) {
		gpu->dma = NULL;
		return ret;
	}
	if (!NVIDIA_P2P_DMA_MAPPING_VERSION_COMPATIBLE(gpu->dma))
		return -EPROTO;
	if (gpu->dma->page_size_type != NVIDIA_P2P_PAGE_SIZE_64KB ||
	    gpu->dma->entries != length / SZ_64K) {
		*reason = UGDS_DRV_REASON_PIECES;
		return -EINVAL;
	}
	*reason = UGDS_DRV_REASON_NONE;
	return 0;
}

static int tell_addresses(struct gpu *gpu, u64 __user *to, u32 *reason)
{
	u64 pages[SZ_64K / UGDS_DRV_PAGE_SIZE];
	u32 entry, i;

	for (entry = 0; entry < gpu->dma->entries; entry++) {
		for (i = 0; i < ARRAY_SIZE(pages); i++)
			pages[i] = gpu->dma->dma_addresses[entry] +
				   i * UGDS_DRV_PAGE_SIZE;
		if (copy_to_user(to, pages, sizeof(pages))) {
			*reason = UGDS_DRV_REASON_ARRAY;
			return -EFAULT;
		}
		to += ARRAY_SIZE(pages);
	}
	return 0;
}

int ugds_request_map_nvidia(struct ugds_file *file, void *request, u32 *reason,
			    struct ugds_mapping **made)
{
	struct ugds_drv_map_nvidia *wish = request;
	enum dma_data_direction direction;
	struct gpu *gpu;
	int ret;

	if (!ugds_access(wish->access, &direction)) {
		*reason = UGDS_DRV_REASON_ARGUMENT;
		return -EINVAL;
	}
	ret = ugds_check_range(wish->address, wish->length, reason);
	if (ret)
		return ret;
	if (!IS_ALIGNED(wish->address | wish->length, SZ_64K)) {
		*reason = UGDS_DRV_REASON_RANGE;
		return -EINVAL;
	}
	gpu = kzalloc(sizeof(*gpu), GFP_KERNEL_ACCOUNT);
	if (!gpu) {
		*reason = UGDS_DRV_REASON_MEMORY;
		return -ENOMEM;
	}
	gpu->mapping.ops = &gpu_ops;
	gpu->address = wish->address;
	/* One range of addresses: CUDA's are unified with the process's. */
	ret = ugds_ledger_claim(file, &gpu->mapping, current->mm, wish->address,
				wish->length, false, reason);
	if (!ret)
		ret = get(file->ud, gpu, wish->length, reason);
	if (!ret)
		ret = tell_addresses(gpu, u64_to_user_ptr(wish->pages), reason);
	if (!ret)
		ret = ugds_ledger_add(file, &gpu->mapping);
	if (ret) {
		release(file, &gpu->mapping);
		return ret;
	}
	wish->token = gpu->mapping.token;
	*made = &gpu->mapping;
	return 0;
}
