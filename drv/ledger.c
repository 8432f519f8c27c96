// SPDX-License-Identifier: GPL-2.0-only
/* What a file has mapped: by token, and by range so that none overlaps another */
#include "internal.h"

int ugds_check_range(u64 begin, u64 length, u32 *reason)
{
	u64 end;

	if (!length || !IS_ALIGNED(begin | length, UGDS_DRV_PAGE_SIZE) ||
	    check_add_overflow(begin, length, &end)) {
		*reason = UGDS_DRV_REASON_RANGE;
		return -EINVAL;
	}
	if (length > UGDS_MAP_MAX) {
		*reason = UGDS_DRV_REASON_LIMIT;
		return -ENOMEM;
	}
	return 0;
}

/*
 * Takes the range for the mapping, from now until ugds_ledger_forget(); without
 * its first and its last page, if others may have those.
 */
int ugds_ledger_claim(struct ugds_file *file, struct ugds_mapping *mapping,
		      const void *space, u64 begin, u64 length,
		      bool shared_ends, u32 *reason)
{
	struct interval_tree_node *node;
	u64 last;

	if (shared_ends) {
		if (length <= 2 * UGDS_DRV_PAGE_SIZE)
			return 0;
		begin += UGDS_DRV_PAGE_SIZE;
		length -= 2 * UGDS_DRV_PAGE_SIZE;
	}
	last = begin + length - 1;
	for (node = interval_tree_iter_first(&file->ranges, begin, last); node;
	     node = interval_tree_iter_next(node, begin, last)) {
		if (container_of(node, struct ugds_mapping, range)->space ==
		    space) {
			*reason = UGDS_DRV_REASON_OVERLAP;
			return -EEXIST;
		}
	}
	mapping->space = space;
	mapping->range.start = begin;
	mapping->range.last = last;
	interval_tree_insert(&mapping->range, &file->ranges);
	return 0;
}

void ugds_ledger_forget(struct ugds_file *file, struct ugds_mapping *mapping)
{
	if (mapping->space)
		interval_tree_remove(&mapping->range, &file->ranges);
	mapping->space = NULL;
}

/* Gives it a token, by which it can be found from then on. */
int ugds_ledger_add(struct ugds_file *file, struct ugds_mapping *mapping)
{
	int ret;

	mapping->token = ++file->ud->last_token;
	ret = xa_insert(&file->tokens, mapping->token, mapping,
			GFP_KERNEL_ACCOUNT);
	if (ret)
		mapping->token = 0;
	return ret;
}

void ugds_ledger_release(struct ugds_file *file, struct ugds_mapping *mapping)
{
	xa_erase(&file->tokens, mapping->token);
	ugds_ledger_forget(file, mapping);
	mapping->ops->release(file, mapping);
}

void ugds_ledger_release_all(struct ugds_file *file)
{
	struct ugds_mapping *mapping;
	unsigned long token;

	xa_for_each(&file->tokens, token, mapping) {
		ugds_ledger_release(file, mapping);
		cond_resched();
	}
}

u32 ugds_ledger_state(struct ugds_file *file, u64 token)
{
	struct ugds_mapping *mapping;
	u32 state = UGDS_DRV_MAPPING_UNKNOWN;

	/* The lock keeps it from being freed meanwhile. */
	xa_lock(&file->tokens);
	mapping = xa_load(&file->tokens, token);
	if (mapping)
		state = READ_ONCE(mapping->revoked) ? UGDS_DRV_MAPPING_REVOKED :
						      UGDS_DRV_MAPPING_LIVE;
	xa_unlock(&file->tokens);
	return state;
}

int ugds_request_unmap(struct ugds_file *file, void *request, u32 *reason,
		       struct ugds_mapping **made)
{
	struct ugds_drv_unmap *unmap = request;
	struct ugds_mapping *mapping;
	int ret = 0;

	if (unmap->reserved) {
		*reason = UGDS_DRV_REASON_ARGUMENT;
		return -EINVAL;
	}
	mapping = xa_load(&file->tokens, unmap->token);
	if (!mapping) {
		*reason = UGDS_DRV_REASON_TOKEN;
		return -ENOENT;
	}
	if (mapping->ops->may_release)
		ret = mapping->ops->may_release(file, mapping, reason);
	if (!ret)
		ugds_ledger_release(file, mapping);
	return ret;
}
