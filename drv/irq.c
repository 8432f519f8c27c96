// SPDX-License-Identifier: GPL-2.0-only
/* MSI-X vectors as eventfds, and the eventfd that tells of what happened. */
#include <linux/eventfd.h>
#include <linux/interrupt.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "internal.h"

struct ugds_vector {
	struct eventfd_ctx *event;
	bool requested;
};

static irqreturn_t deliver(int irq, void *context)
{
	struct ugds_vector *vector = context;

	ugds_signal(vector->event);
	return IRQ_HANDLED;
}

/*
 * All vectors that can be had, for as long as the file is open. The PCI core
 * writes the command register when it turns MSI-X on or off, from what it read
 * before, and an owner's call turns bus mastering off at any moment; so both
 * are done while it is off anyway, and nothing is imported.
 */
void ugds_vectors_on(struct ugds_device *ud)
{
	int got = 0;

	if (ud->msix)
		got = pci_alloc_irq_vectors(ud->pdev, 1, ud->msix,
					    PCI_IRQ_MSIX);
	ud->vectors = max(got, 0);
}

void ugds_vectors_off(struct ugds_device *ud)
{
	if (ud->vectors)
		pci_free_irq_vectors(ud->pdev);
	ud->vectors = 0;
}

void ugds_interrupts_off(struct ugds_file *file)
{
	struct ugds_device *ud = file->ud;
	u32 i;

	if (!file->vector)
		return;
	for (i = 0; i < file->vector_count; i++) {
		struct ugds_vector *vector = &file->vector[i];

		if (vector->requested)
			free_irq(pci_irq_vector(ud->pdev, i), vector);
		if (vector->event)
			eventfd_ctx_put(vector->event);
	}
	kvfree(file->vector);
	file->vector = NULL;
	file->vector_count = 0;
}

static int take_eventfd(int fd, const char *point,
			struct eventfd_ctx **event, u32 *reason)
{
	int ret = ugds_fault(point);

	if (!ret) {
		*event = eventfd_ctx_fdget(fd);
		ret = PTR_ERR_OR_ZERO(*event);
	}
	if (ret) {
		*event = NULL;
		*reason = UGDS_DRV_REASON_DESCRIPTOR;
	}
	return ret;
}

static int connect(struct ugds_file *file, u32 index, int fd, u32 *reason)
{
	struct ugds_vector *vector = &file->vector[index];
	int ret;

	ret = take_eventfd(fd, "irq_eventfd", &vector->event, reason);
	if (ret)
		return ret;
	ret = ugds_fault("irq_request");
	if (!ret)
		ret = request_irq(pci_irq_vector(file->ud->pdev, index),
				  deliver, 0, dev_name(&file->ud->dev), vector);
	vector->requested = !ret;
	if (ret)
		*reason = UGDS_DRV_REASON_VECTORS;
	return ret;
}

int ugds_request_interrupts(struct ugds_file *file, void *request, u32 *reason,
			    struct ugds_mapping **made)
{
	struct ugds_drv_interrupts *wish = request;
	s32 __user *from = u64_to_user_ptr(wish->eventfds);
	struct ugds_device *ud = file->ud;
	u32 i;
	int ret = 0;

	ugds_interrupts_off(file);
	if (!wish->count)
		return 0;
	*reason = UGDS_DRV_REASON_VECTORS;
	if (wish->count > ud->vectors)
		return -EINVAL;
	*reason = UGDS_DRV_REASON_MEMORY;
	if (ugds_fault("irq_table"))
		return -EUCLEAN;
	file->vector = kvcalloc(wish->count, sizeof(*file->vector),
				GFP_KERNEL_ACCOUNT);
	if (!file->vector)
		return -ENOMEM;
	*reason = UGDS_DRV_REASON_NONE;
	file->vector_count = wish->count;
	for (i = 0; i < wish->count && !ret; i++) {
		s32 fd;

		if (get_user(fd, from + i)) {
			*reason = UGDS_DRV_REASON_ARRAY;
			ret = -EFAULT;
		} else if (fd < -1) {
			*reason = UGDS_DRV_REASON_DESCRIPTOR;
			ret = -EBADF;
		} else if (fd >= 0) {
			ret = connect(file, i, fd, reason);
		}
	}
	if (ret)
		ugds_interrupts_off(file);
	return ret;
}

static void set_event(struct ugds_device *ud, struct eventfd_ctx *event)
{
	struct eventfd_ctx *before;

	spin_lock(&ud->state_lock);
	before = ud->event;
	ud->event = event;
	spin_unlock(&ud->state_lock);
	if (before)
		eventfd_ctx_put(before);
}

void ugds_event_off(struct ugds_device *ud)
{
	set_event(ud, NULL);
}

int ugds_request_event(struct ugds_file *file, void *request, u32 *reason,
		       struct ugds_mapping **made)
{
	struct ugds_drv_event *wish = request;
	struct eventfd_ctx *event = NULL;
	int ret;

	if (wish->fd < -1) {
		*reason = UGDS_DRV_REASON_DESCRIPTOR;
		return -EBADF;
	}
	if (wish->fd >= 0) {
		ret = take_eventfd(wish->fd, "event_eventfd", &event,
				   reason);
		if (ret)
			return ret;
	}
	set_event(file->ud, event);
	return 0;
}
