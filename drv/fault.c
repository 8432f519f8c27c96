// SPDX-License-Identifier: GPL-2.0-only
/* The fault points' switch. Only in a build for tests. */
#include <linux/bug.h>
#include <linux/errno.h>
#include <linux/kernel.h>
#include <linux/moduleparam.h>
#include <linux/spinlock.h>
#include <linux/string.h>
#include <linux/sysfs.h>

#include "fault.h"

/* Every name that the module's files use. */
static const char *const names[] = {
	"probe_enable",
	"probe_region",
	"probe_registers",
	"probe_mask",
	"probe_state",
	"probe_minor",
	"probe_node",
	"open_file",
	"open_stop",
	"mmap_coherent",
	"coherent_pages",
	"coherent_dma",
	"coherent_token",
	"host_account",
	"host_pin",
	"host_table",
	"host_dma",
	"host_addresses",
	"host_token",
	"dmabuf_attach",
	"dmabuf_pin",
	"dmabuf_fence",
	"dmabuf_map",
	"dmabuf_addresses",
	"dmabuf_token",
	"irq_table",
	"irq_eventfd",
	"irq_request",
	"event_eventfd",
	"answer",
	"reset_stop",
	"plant_leak",
};

static DEFINE_SPINLOCK(lock);
static int armed = -1;

static int find(const char *text)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(names); i++) {
		if (sysfs_streq(text, names[i]))
			return i;
	}
	return -1;
}

int ugds_fault(const char *point)
{
	int number = find(point);
	bool met;

	WARN_ONCE(number < 0, "fault point %s is not in the list\n", point);
	spin_lock(&lock);
	met = number >= 0 && armed == number;
	if (met)
		armed = -1;
	spin_unlock(&lock);
	return met ? -EUCLEAN : 0;
}

static int arm(const char *text, const struct kernel_param *param)
{
	int found = find(text);

	if (found < 0 && !sysfs_streq(text, ""))
		return -EINVAL;
	spin_lock(&lock);
	armed = found;
	spin_unlock(&lock);
	return 0;
}

static int show_armed(char *buffer, const struct kernel_param *param)
{
	int now;

	spin_lock(&lock);
	now = armed;
	spin_unlock(&lock);
	return sysfs_emit(buffer, "%s\n", now < 0 ? "" : names[now]);
}

static int show_points(char *buffer, const struct kernel_param *param)
{
	int length = 0;
	int i;

	for (i = 0; i < ARRAY_SIZE(names); i++)
		length += sysfs_emit_at(buffer, length, "%s\n", names[i]);
	return length;
}

static const struct kernel_param_ops armed_ops = {
	.set = arm,
	.get = show_armed,
};

static const struct kernel_param_ops points_ops = {
	.get = show_points,
};

module_param_cb(fault, &armed_ops, NULL, 0600);
MODULE_PARM_DESC(fault, "the set-up step that is to fail, once");
module_param_cb(fault_points, &points_ops, NULL, 0400);
MODULE_PARM_DESC(fault_points, "the steps that can be named");
