// SPDX-License-Identifier: GPL-2.0-only
/* A process's memory, pinned, and mapped for the device by the DMA API. */
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "internal.h"

/* Pages pinned at a time: between two looks for a signal. */
#define CHUNK 8192UL

struct host {
	struct ugds_mapping mapping;
	struct mm_struct *mm;		/* whose locked memory it counts as */
	unsigned long count;		/* pages that were asked for */
	unsigned long pinned;
	bool accounted;
	bool mapped;
	enum dma_data_direction direction;
	struct sg_table table;
};

bool ugds_access(u32 access, enum dma_data_direction *direction)
{
	if (access == UGDS_DRV_ACCESS_READ)
		*direction = DMA_TO_DEVICE;
	else if (access == UGDS_DRV_ACCESS_READ_WRITE)
		*direction = DMA_BIDIRECTIONAL;
	else
		return false;
	return true;
}

static void unpin_table(struct host *host)
{
	bool dirty = host->direction != DMA_TO_DEVICE;
	struct scatterlist *piece;
	int i;

	for_each_sgtable_sg(&host->table, piece, i) {
		unpin_user_page_range_dirty_lock(sg_page(piece),
						 piece->length >> PAGE_SHIFT,
						 dirty);
		cond_resched();
	}
	sg_free_table(&host->table);
}

/* Undoes whatever has been done. */
static void release(struct ugds_file *file, struct ugds_mapping *mapping)
{
	struct host *host = container_of(mapping, struct host, mapping);

	if (host->mapped) {
		dma_unmap_sgtable(&file->ud->pdev->dev, &host->table,
				  host->direction, UGDS_DMA_ATTRS);
		ugds_forget_translations(file->ud);
	}
	if (host->table.sgl)
		unpin_table(host);
	if (host->accounted)
		account_locked_vm(host->mm, host->count, false);
	mmdrop(host->mm);
	ugds_ledger_forget(file, mapping);
	if (!ugds_fault("plant_leak"))
		kfree(host);
}

static const struct ugds_mapping_ops host_ops = {
	.release = release,
};

static int pin_all(struct host *host, unsigned long address,
		   struct page **pages)
{
	unsigned int how = FOLL_LONGTERM;
	long got;

	if (host->direction != DMA_TO_DEVICE)
		how |= FOLL_WRITE;
	while (host->pinned < host->count) {
		if (fatal_signal_pending(current))
			return -EINTR;
		got = ugds_pin(address + host->pinned * PAGE_SIZE,
			       min(host->count - host->pinned, CHUNK), how,
			       pages + host->pinned);
		if (got <= 0)
			return got ? got : -EFAULT;
		host->pinned += got;
		cond_resched();
	}
	return ugds_fault("host_pin");
}

/* Pins the pages and makes a table of them, or does neither. */
static int pin(struct ugds_device *ud, struct host *host, unsigned long address,
	       u32 *reason)
{
	struct page **pages;
	int ret;

	*reason = UGDS_DRV_REASON_MEMORY;
	pages = kvmalloc_array(host->count, sizeof(*pages), GFP_KERNEL_ACCOUNT);
	if (!pages)
		return -ENOMEM;
	ret = pin_all(host, address, pages);
	if (ret && ret != -ENOMEM)
		*reason = UGDS_DRV_REASON_UNPINNABLE;
	if (!ret)
		ret = ugds_fault("host_table");
	if (!ret)
		ret = sg_alloc_table_from_pages_segment(&host->table, pages,
							host->count, 0,
							host->count * PAGE_SIZE,
							UINT_MAX & PAGE_MASK,
							GFP_KERNEL_ACCOUNT);
	if (ret) {
		unpin_user_pages(pages, host->pinned);
		host->table.sgl = NULL;
	} else {
		*reason = UGDS_DRV_REASON_NONE;
	}
	kvfree(pages);
	return ret;
}

static int map(struct ugds_device *ud, struct host *host, u32 *reason)
{
	struct scatterlist *piece;
	int ret, i;

	*reason = UGDS_DRV_REASON_DMA;
	ret = ugds_fault("host_dma");
	if (ret)
		return ret;
	ret = dma_map_sgtable(&ud->pdev->dev, &host->table, host->direction,
			      UGDS_DMA_ATTRS);
	if (ret)
		return ret == -ENOMEM ? ret : -EIO;
	host->mapped = true;
	for_each_sgtable_dma_sg(&host->table, piece, i) {
		if (ugds_bounced(ud, sg_dma_address(piece))) {
			*reason = UGDS_DRV_REASON_BOUNCED;
			return -EOPNOTSUPP;
		}
	}
	*reason = UGDS_DRV_REASON_NONE;
	return 0;
}

static int tell_addresses(struct host *host, u64 __user *to, u32 *reason)
{
	const unsigned int capacity = PAGE_SIZE / sizeof(u64);
	u64 *buffer = (u64 *)__get_free_page(GFP_KERNEL_ACCOUNT);
	struct scatterlist *piece;
	unsigned int used = 0;
	int ret = -ENOMEM;
	int i;

	*reason = UGDS_DRV_REASON_MEMORY;
	if (!buffer)
		return ret;
	*reason = UGDS_DRV_REASON_ARRAY;
	ret = ugds_fault("host_addresses");
	for_each_sgtable_dma_sg(&host->table, piece, i) {
		u64 at = sg_dma_address(piece);
		u64 end = at + sg_dma_len(piece);

		for (; at < end && !ret; at += UGDS_DRV_PAGE_SIZE) {
			buffer[used++] = at;
			if (used < capacity)
				continue;
			if (copy_to_user(to, buffer, PAGE_SIZE))
				ret = -EFAULT;
			to += capacity;
			used = 0;
		}
	}
	if (!ret && copy_to_user(to, buffer, used * sizeof(u64)))
		ret = -EFAULT;
	free_page((unsigned long)buffer);
	if (!ret)
		*reason = UGDS_DRV_REASON_NONE;
	return ret;
}

static int account(struct host *host, u32 *reason)
{
	int ret;

	*reason = UGDS_DRV_REASON_LIMIT;
	ret = ugds_fault("host_account");
	if (!ret)
		ret = account_locked_vm(host->mm, host->count, true);
	if (ret)
		return ret;
	host->accounted = true;
	*reason = UGDS_DRV_REASON_NONE;
	return 0;
}

int ugds_request_map_host(struct ugds_file *file, void *request, u32 *reason,
			  struct ugds_mapping **made)
{
	struct ugds_drv_map_host *wish = request;
	enum dma_data_direction direction;
	struct host *host;
	int ret;

	if (!ugds_access(wish->access, &direction)) {
		*reason = UGDS_DRV_REASON_ARGUMENT;
		return -EINVAL;
	}
	ret = ugds_check_range(wish->address, wish->length, reason);
	if (ret)
		return ret;
	host = kzalloc(sizeof(*host), GFP_KERNEL_ACCOUNT);
	if (!host) {
		*reason = UGDS_DRV_REASON_MEMORY;
		return -ENOMEM;
	}
	host->mapping.ops = &host_ops;
	host->mm = current->mm;
	mmgrab(host->mm);
	host->direction = direction;
	host->count = wish->length >> PAGE_SHIFT;
	ret = ugds_ledger_claim(file, &host->mapping, host->mm, wish->address,
				wish->length,
				wish->flags & UGDS_DRV_MAP_SHARED_ENDS, reason);
	if (!ret)
		ret = account(host, reason);
	if (!ret)
		ret = pin(file->ud, host, wish->address, reason);
	if (!ret)
		ret = map(file->ud, host, reason);
	if (!ret)
		ret = tell_addresses(host, u64_to_user_ptr(wish->pages),
				     reason);
	if (!ret)
		ret = ugds_fault("host_token");
	if (!ret)
		ret = ugds_ledger_add(file, &host->mapping);
	if (ret) {
		release(file, &host->mapping);
		return ret;
	}
	wish->token = host->mapping.token;
	*made = &host->mapping;
	return 0;
}
