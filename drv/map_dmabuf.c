// SPDX-License-Identifier: GPL-2.0-only
/*
 * Another device's memory, as a DMA-BUF.
 *
 * It is imported dynamically: the exporter may take it back, and tells of that
 * before it does. The commands that name its addresses are in user space's
 * rings, so what is done then is to stop the controller, here and now, and to
 * unmap; the file's owner is told, and recovers by a reset.
 *
 * Where no IOMMU translates an unmapped address still leads somewhere. There
 * the exporter is asked to keep the memory in its place, by a pin.
 *
 * Nothing is read of the table but its DMA addresses: an importer may not.
 */
#include <linux/dma-buf.h>
#include <linux/dma-resv.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "internal.h"

UGDS_IMPORT_DMA_BUF;

#define FENCE_PATIENCE (5 * HZ)

struct import {
	struct ugds_mapping mapping;
	struct ugds_device *ud;
	struct dma_buf *dmabuf;
	struct dma_buf_attachment *attachment;
	enum dma_data_direction direction;
	bool stays;			/* the exporter has to leave it there */

	/* Under the reservation lock. */
	bool pinned;
	struct sg_table *table;		/* NULL: not mapped, or not any more */

	u64 *pages;			/* while it is being made */
};

/* The exporter takes its memory back. Called under its reservation lock. */
static void taken_back(struct dma_buf_attachment *attachment)
{
	struct import *import = attachment->importer_priv;

	dma_resv_assert_held(import->dmabuf->resv);
	if (!import->table)
		return;
	WRITE_ONCE(import->mapping.revoked, true);
	ugds_wedge(import->ud, UGDS_DRV_STATE_WEDGED, UGDS_DRV_REASON_REVOKED);
	dma_buf_unmap_attachment(attachment, import->table, import->direction);
	import->table = NULL;
	ugds_forget_translations(import->ud);
}

static const struct dma_buf_attach_ops revocable_ops = {
	.allow_peer2peer = true,
#ifdef UGDS_INVALIDATE_MAPPINGS
	.invalidate_mappings = taken_back,
#else
	.move_notify = taken_back,
#endif
};

/* Of an importer whose memory has to stay. Older kernels want a callback. */
static const struct dma_buf_attach_ops staying_ops = {
	.allow_peer2peer = true,
#ifndef UGDS_INVALIDATE_MAPPINGS
	.move_notify = taken_back,
#endif
};

/* Undoes whatever has been done. */
static void release(struct ugds_file *file, struct ugds_mapping *mapping)
{
	struct import *import = container_of(mapping, struct import, mapping);
	struct dma_buf_attachment *attachment = import->attachment;

	if (attachment) {
		dma_resv_lock(import->dmabuf->resv, NULL);
		if (import->table)
			dma_buf_unmap_attachment(attachment, import->table,
						 import->direction);
		import->table = NULL;
		ugds_forget_translations(import->ud);
		if (import->pinned)
			dma_buf_unpin(attachment);
		dma_resv_unlock(import->dmabuf->resv);
		dma_buf_detach(import->dmabuf, attachment);
		/*
		 * Older kernels map what never moves when it is attached, and
		 * so unmap it only now.
		 */
		ugds_forget_translations(import->ud);
	}
	ugds_ledger_forget(file, mapping);
	dma_buf_put(import->dmabuf);
	kvfree(import->pages);
	kfree(import);
}

static const struct ugds_mapping_ops import_ops = {
	.release = release,
};

static struct dma_buf_attachment *
try_attach(struct import *import, const struct dma_buf_attach_ops *ops)
{
	return dma_buf_dynamic_attach(import->dmabuf, &import->ud->pdev->dev,
				      ops, import);
}

static int attach(struct import *import, u32 *reason)
{
	struct dma_buf_attachment *made, *other;

	*reason = UGDS_DRV_REASON_ATTACH;
	if (ugds_fault("dmabuf_attach"))
		return -EUCLEAN;
	made = try_attach(import, import->stays ? &staying_ops :
						  &revocable_ops);
	if (!IS_ERR(made)) {
		import->attachment = made;
		*reason = UGDS_DRV_REASON_NONE;
		return 0;
	}
	if (!import->stays)
		return PTR_ERR(made);
	/* Is it that, or would it not have us at all? */
	other = try_attach(import, &revocable_ops);
	if (IS_ERR(other))
		return PTR_ERR(made);
	dma_buf_detach(import->dmabuf, other);
	*reason = UGDS_DRV_REASON_CANNOT_PIN;
	return -EOPNOTSUPP;
}

/* Waits until earlier work on the memory is done, for a while. */
static int wait(struct import *import, enum dma_resv_usage usage, u32 *reason)
{
	long left;

	*reason = UGDS_DRV_REASON_FENCE;
	if (ugds_fault("dmabuf_fence"))
		return -EUCLEAN;
	left = dma_resv_wait_timeout(import->dmabuf->resv, usage, true,
				     FENCE_PATIENCE);
	if (left < 0)
		return -EINTR;
	if (!left)
		return -ETIMEDOUT;
	*reason = UGDS_DRV_REASON_NONE;
	return 0;
}

/* What keeps the memory in its place, or that nothing does. */
static int hold(struct import *import, struct ugds_drv_map_dmabuf *wish,
		u32 *reason)
{
	bool movable = dma_buf_is_dynamic(import->dmabuf);
	int ret;

	if (import->stays) {
		ret = ugds_fault("dmabuf_pin");
		if (!ret)
			ret = dma_buf_pin(import->attachment);
		if (ret) {
			*reason = UGDS_DRV_REASON_CANNOT_PIN;
			return ret == -EUCLEAN ? ret : -EOPNOTSUPP;
		}
		import->pinned = true;
		wish->holding = movable ? UGDS_DRV_HOLDING_PINNED :
					  UGDS_DRV_HOLDING_STATIC;
	} else if (UGDS_ANY_MAY_REVOKE) {
		wish->holding = UGDS_DRV_HOLDING_REVOCABLE;
	} else if (!movable) {
		wish->holding = UGDS_DRV_HOLDING_STATIC;
	} else {
		/* Without that option the framework pins for every importer. */
		wish->holding = IS_ENABLED(CONFIG_DMABUF_MOVE_NOTIFY) ?
				UGDS_DRV_HOLDING_REVOCABLE :
				UGDS_DRV_HOLDING_PINNED;
	}
	return 0;
}

/* The addresses of pages from `offset` on. */
static int read_table(struct import *import, u64 offset, u64 count)
{
	struct scatterlist *piece;
	u64 from = 0, found = 0;
	int i;

	for_each_sgtable_dma_sg(import->table, piece, i) {
		u64 length = sg_dma_len(piece);
		u64 at = sg_dma_address(piece);
		u64 done = 0;

		if (!IS_ALIGNED(at | length, UGDS_DRV_PAGE_SIZE))
			return -EINVAL;
		if (from + length <= offset) {
			from += length;
			continue;
		}
		if (from < offset)
			done = offset - from;
		for (; done < length && found < count;
		     done += UGDS_DRV_PAGE_SIZE)
			import->pages[found++] = at + done;
		from += length;
		if (found == count)
			return 0;
	}
	return -EINVAL;
}

/* Maps it, and finds out where it is. */
static int map(struct import *import, struct ugds_drv_map_dmabuf *wish,
	       u32 *reason)
{
	struct sg_table *table;
	struct pci_dev *peer;
	bool physical;
	u64 count = wish->length / UGDS_DRV_PAGE_SIZE;
	int ret;

	dma_resv_assert_held(import->dmabuf->resv);
	ret = hold(import, wish, reason);
	if (ret)
		return ret;
	*reason = UGDS_DRV_REASON_EXPORTER;
	if (ugds_fault("dmabuf_map"))
		return -EUCLEAN;
	table = dma_buf_map_attachment(import->attachment, import->direction);
	if (IS_ERR(table))
		return PTR_ERR(table);
	import->table = table;
	/* Where mapping moved it, that has to be over. */
	ret = wait(import, DMA_RESV_USAGE_KERNEL, reason);
	if (ret)
		return ret;
	ret = ugds_fault("dmabuf_addresses");
	if (!ret)
		ret = read_table(import, wish->offset, count);
	if (ret) {
		*reason = UGDS_DRV_REASON_PIECES;
		return ret;
	}
	wish->peer_bytes = ugds_peer_bytes(import->ud, import->pages, count,
					   &peer, &physical);
	wish->physical = physical;
	wish->placement = wish->peer_bytes == wish->length ?
			  UGDS_DRV_PLACEMENT_PEER : UGDS_DRV_PLACEMENT_HOST;
	if (peer) {
		wish->peer_domain = pci_domain_nr(peer->bus);
		wish->peer_address = pci_dev_id(peer);
		pci_dev_put(peer);
	}
	*reason = UGDS_DRV_REASON_NONE;
	if (wish->placement != UGDS_DRV_PLACEMENT_PEER &&
	    (wish->flags & UGDS_DRV_DMABUF_REQUIRE_PEER)) {
		*reason = UGDS_DRV_REASON_NOT_PEER;
		return -EXDEV;
	}
	return 0;
}

static int import_it(struct import *import, struct ugds_drv_map_dmabuf *wish,
		     u32 *reason)
{
	bool writes = import->direction != DMA_TO_DEVICE;
	int ret;

	*reason = UGDS_DRV_REASON_MEMORY;
	import->pages = kvmalloc_array(wish->length / UGDS_DRV_PAGE_SIZE,
				       sizeof(u64), GFP_KERNEL_ACCOUNT);
	if (!import->pages)
		return -ENOMEM;
	ret = attach(import, reason);
	if (ret)
		return ret;
	/* Users' work on it may take long: not under the lock. */
	ret = wait(import, dma_resv_usage_rw(writes), reason);
	if (ret)
		return ret;
	ret = dma_resv_lock_interruptible(import->dmabuf->resv, NULL);
	if (ret)
		return ret;
	ret = map(import, wish, reason);
	dma_resv_unlock(import->dmabuf->resv);
	return ret;
}

static int check(struct ugds_drv_map_dmabuf *wish, struct import *import,
		 u32 *reason)
{
	u64 end;
	int ret;

	if (!ugds_access(wish->access, &import->direction)) {
		*reason = UGDS_DRV_REASON_ARGUMENT;
		return -EINVAL;
	}
	ret = ugds_check_range(wish->offset, wish->length, reason);
	if (ret)
		return ret;
	end = wish->offset + wish->length;
	if (end > import->dmabuf->size) {
		*reason = UGDS_DRV_REASON_BEYOND_END;
		return -EINVAL;
	}
	return 0;
}

static void clear_answer(struct ugds_drv_map_dmabuf *wish)
{
	wish->placement = 0;
	wish->holding = 0;
	wish->peer_domain = 0;
	wish->peer_address = 0;
	wish->physical = 0;
	wish->peer_bytes = 0;
}

int ugds_request_map_dmabuf(struct ugds_file *file, void *request, u32 *reason,
			    struct ugds_mapping **made)
{
	struct ugds_drv_map_dmabuf *wish = request;
	struct import *import;
	int ret;

	clear_answer(wish);
	import = kzalloc(sizeof(*import), GFP_KERNEL_ACCOUNT);
	if (!import) {
		*reason = UGDS_DRV_REASON_MEMORY;
		return -ENOMEM;
	}
	import->mapping.ops = &import_ops;
	import->ud = file->ud;
	import->dmabuf = dma_buf_get(wish->fd);
	if (IS_ERR(import->dmabuf)) {
		ret = PTR_ERR(import->dmabuf);
		*reason = UGDS_DRV_REASON_DESCRIPTOR;
		kfree(import);
		return ret;
	}
	import->stays = !file->ud->translated &&
			!(wish->flags & UGDS_DRV_DMABUF_ALLOW_REVOCABLE);
	ret = check(wish, import, reason);
	if (!ret)
		ret = ugds_ledger_claim(file, &import->mapping, import->dmabuf,
					wish->offset, wish->length,
					wish->flags &
					UGDS_DRV_DMABUF_SHARED_ENDS, reason);
	if (!ret)
		ret = import_it(import, wish, reason);
	if (!ret && copy_to_user(u64_to_user_ptr(wish->pages), import->pages,
				 wish->length / UGDS_DRV_PAGE_SIZE *
				 sizeof(u64))) {
		*reason = UGDS_DRV_REASON_ARRAY;
		ret = -EFAULT;
	}
	if (!ret)
		ret = ugds_fault("dmabuf_token");
	if (!ret && READ_ONCE(import->mapping.revoked)) {
		*reason = UGDS_DRV_REASON_STALE;
		ret = -ESTALE;
	}
	if (!ret)
		ret = ugds_ledger_add(file, &import->mapping);
	if (ret) {
		release(file, &import->mapping);
		return ret;
	}
	kvfree(import->pages);
	import->pages = NULL;
	wish->token = import->mapping.token;
	*made = &import->mapping;
	return 0;
}
