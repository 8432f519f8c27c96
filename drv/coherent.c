// SPDX-License-Identifier: GPL-2.0-only
/*
 * Memory for queues and lists: pages that are contiguous for the device. They
 * are ordinary pages, each with a count of its own, so that what a program has
 * mapped keeps its contents when the device is removed: a completion queue that
 * turned to zeros or ones would read as completions.
 */
#include <linux/mm.h>
#include <linux/slab.h>

#include "internal.h"

struct coherent {
	struct ugds_mapping mapping;
	struct list_head list;		/* of the file's, under its map_lock */
	refcount_t holds;		/* of the ledger's, and of each VMA */
	struct page *pages;
	u64 length;
	u64 offset;			/* for mmap */
	dma_addr_t address;
};

static void free_pages_of(struct page *pages, u64 length)
{
	u64 i;

	for (i = 0; i < length >> PAGE_SHIFT; i++)
		__free_page(pages + i);
}

/* As many pages as that, contiguous, and each to be freed by itself. */
static struct page *alloc_pages_of(u64 length)
{
	gfp_t how = GFP_KERNEL_ACCOUNT | __GFP_ZERO | __GFP_NOWARN;
	int order = get_order(length);
	struct page *pages;
	u64 i;

	if (ugds_fault("coherent_pages"))
		return NULL;
	pages = alloc_pages(how, order);
	if (!pages)
		return NULL;
	split_page(pages, order);
	for (i = length >> PAGE_SHIFT; i < 1UL << order; i++)
		__free_page(pages + i);
	return pages;
}

static void drop(struct coherent *area)
{
	if (refcount_dec_and_test(&area->holds))
		kfree(area);
}

static int may_release(struct ugds_file *file, struct ugds_mapping *mapping,
		       u32 *reason)
{
	struct coherent *area = container_of(mapping, struct coherent, mapping);
	bool mapped;

	mutex_lock(&file->map_lock);
	mapped = refcount_read(&area->holds) > 1;
	if (!mapped)
		list_del_init(&area->list);	/* nobody maps it now */
	mutex_unlock(&file->map_lock);
	if (!mapped)
		return 0;
	*reason = UGDS_DRV_REASON_MAPPED;
	return -EBUSY;
}

static void release(struct ugds_file *file, struct ugds_mapping *mapping)
{
	struct coherent *area = container_of(mapping, struct coherent, mapping);

	mutex_lock(&file->map_lock);
	list_del_init(&area->list);
	mutex_unlock(&file->map_lock);
	dma_unmap_page_attrs(&file->ud->pdev->dev, area->address, area->length,
			     DMA_BIDIRECTIONAL, UGDS_DMA_ATTRS);
	ugds_forget_translations(file->ud);
	free_pages_of(area->pages, area->length);
	file->coherent_bytes -= area->length;
	drop(area);
}

static const struct ugds_mapping_ops coherent_ops = {
	.may_release = may_release,
	.release = release,
};

static int map_pages(struct ugds_device *ud, struct coherent *area, u32 *reason)
{
	struct device *dev = &ud->pdev->dev;
	u64 alignment = min_t(u64, roundup_pow_of_two(area->length), SZ_64K);

	*reason = UGDS_DRV_REASON_DMA;
	if (ugds_fault("coherent_dma"))
		return -EUCLEAN;
	area->address = dma_map_page_attrs(dev, area->pages, 0, area->length,
					   DMA_BIDIRECTIONAL, UGDS_DMA_ATTRS);
	if (dma_mapping_error(dev, area->address))
		return -EIO;
	if (IS_ALIGNED(area->address, alignment) &&
	    !ugds_bounced(ud, area->address)) {
		*reason = UGDS_DRV_REASON_NONE;
		return 0;
	}
	if (ugds_bounced(ud, area->address))
		*reason = UGDS_DRV_REASON_BOUNCED;
	dma_unmap_page_attrs(dev, area->address, area->length,
			     DMA_BIDIRECTIONAL, UGDS_DMA_ATTRS);
	return *reason == UGDS_DRV_REASON_BOUNCED ? -EOPNOTSUPP : -EIO;
}

int ugds_request_alloc(struct ugds_file *file, void *request, u32 *reason,
		       struct ugds_mapping **made)
{
	struct ugds_drv_alloc *alloc = request;
	struct coherent *area;
	int ret;

	if (alloc->reserved) {
		*reason = UGDS_DRV_REASON_ARGUMENT;
		return -EINVAL;
	}
	ret = ugds_check_range(0, alloc->length, reason);
	if (ret)
		return ret;
	if (alloc->length > UGDS_COHERENT_MAX ||
	    alloc->length > UGDS_COHERENT_TOTAL - file->coherent_bytes) {
		*reason = UGDS_DRV_REASON_LIMIT;
		return -ENOMEM;
	}
	*reason = UGDS_DRV_REASON_MEMORY;
	area = kzalloc(sizeof(*area), GFP_KERNEL_ACCOUNT);
	if (!area)
		return -ENOMEM;
	area->mapping.ops = &coherent_ops;
	area->length = alloc->length;
	area->offset = file->next_offset;
	INIT_LIST_HEAD(&area->list);
	refcount_set(&area->holds, 1);
	area->pages = alloc_pages_of(area->length);
	ret = -ENOMEM;
	if (!area->pages)
		goto free_area;
	ret = map_pages(file->ud, area, reason);
	if (ret)
		goto free_pages;
	*reason = UGDS_DRV_REASON_MEMORY;
	file->coherent_bytes += area->length;
	ret = ugds_fault("coherent_token");
	if (!ret)
		ret = ugds_ledger_add(file, &area->mapping);
	if (ret) {
		release(file, &area->mapping);
		return ret;
	}
	*reason = UGDS_DRV_REASON_NONE;
	file->next_offset += area->length;
	mutex_lock(&file->map_lock);
	list_add(&area->list, &file->coherent);
	mutex_unlock(&file->map_lock);
	alloc->dma_address = area->address;
	alloc->mmap_offset = area->offset;
	alloc->token = area->mapping.token;
	*made = &area->mapping;
	return 0;

free_pages:
	free_pages_of(area->pages, area->length);
free_area:
	kfree(area);
	return ret;
}

static void area_open(struct vm_area_struct *vma)
{
	struct coherent *area = vma->vm_private_data;

	refcount_inc(&area->holds);
}

static void area_close(struct vm_area_struct *vma)
{
	drop(vma->vm_private_data);
}

static const struct vm_operations_struct area_ops = {
	.open = area_open,
	.close = area_close,
};

static struct coherent *find(struct ugds_file *file, u64 offset)
{
	struct coherent *area;

	list_for_each_entry(area, &file->coherent, list) {
		if (area->offset == offset)
			return area;
	}
	return NULL;
}

int ugds_coherent_mmap(struct ugds_file *file, struct vm_area_struct *vma)
{
	struct coherent *area;
	unsigned long i;
	int ret = -EINVAL;

	mutex_lock(&file->map_lock);
	area = find(file, (u64)vma->vm_pgoff << PAGE_SHIFT);
	if (!area || vma_pages(vma) > area->length >> PAGE_SHIFT)
		goto unlock;
	/* VM_IO: it cannot be pinned, and so not be mapped as host memory. */
	vm_flags_set(vma, VM_IO | VM_DONTEXPAND | VM_DONTDUMP | VM_DONTCOPY);
	ret = ugds_fault("mmap_coherent");
	for (i = 0; i < vma_pages(vma) && !ret; i++)
		ret = vm_insert_page(vma, vma->vm_start + i * PAGE_SIZE,
				     area->pages + i);
	if (ret)
		goto unlock;
	refcount_inc(&area->holds);
	vma->vm_private_data = area;
	vma->vm_ops = &area_ops;
unlock:
	mutex_unlock(&file->map_lock);
	return ret;
}
