/* SPDX-License-Identifier: GPL-2.0-only */
/* What differs between the kernels that the module builds for, from 6.1 on. */
#ifndef UGDS_DRV_COMPAT_H
#define UGDS_DRV_COMPAT_H

#include <linux/device/class.h>
#include <linux/dma-mapping.h>
#include <linux/eventfd.h>
#include <linux/iommu.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/version.h>

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
static inline void vm_flags_set(struct vm_area_struct *vma, vm_flags_t flags)
{
	vma->vm_flags |= flags;
}

static inline void vm_flags_clear(struct vm_area_struct *vma, vm_flags_t flags)
{
	vma->vm_flags &= ~flags;
}
#endif

static inline struct class *ugds_class_create(const char *name)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 4, 0)
	return class_create(THIS_MODULE, name);
#else
	return class_create(name);
#endif
}

static inline void ugds_signal(struct eventfd_ctx *event)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 8, 0)
	eventfd_signal(event, 1);
#else
	eventfd_signal(event);
#endif
}

/*
 * A long pin keeps the very pages that the process sees, whatever it writes
 * later. Older kernels do that for pins to write alone: the zero page and those
 * of a private file mapping would be replaced, and the device would go on to
 * read what was there before. So private memory is pinned as if it were to be
 * written, and each VMA by itself, since what is shared may not be.
 */
static inline void ugds_pin_for_good(unsigned long address,
				     unsigned long *count, unsigned int *how)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
	struct vm_area_struct *vma;

	if (*how & FOLL_WRITE)
		return;
	vma = vma_lookup(current->mm, address);
	if (!vma)
		return;
	*count = min(*count, (vma->vm_end - address) >> PAGE_SHIFT);
	if (is_cow_mapping(vma->vm_flags) && (vma->vm_flags & VM_READ))
		*how |= FOLL_WRITE | FOLL_FORCE;
#endif
}

/*
 * Pins pages of this process, or the first of them. Not by the fast way, which
 * looks at pages alone: registers and coherent memory are told by their VMA.
 */
static inline long ugds_pin(unsigned long address, unsigned long count,
			    unsigned int how, struct page **pages)
{
	long got;

	mmap_read_lock(current->mm);
	ugds_pin_for_good(address, &count, &how);
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 5, 0)
	got = pin_user_pages(address, count, how, pages, NULL);
#else
	got = pin_user_pages(address, count, how, pages);
#endif
	mmap_read_unlock(current->mm);
	return got;
}

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 13, 0)
#define UGDS_IMPORT_DMA_BUF MODULE_IMPORT_NS(DMA_BUF)
#else
#define UGDS_IMPORT_DMA_BUF MODULE_IMPORT_NS("DMA_BUF")
#endif

/*
 * UGDS_INVALIDATE_MAPPINGS (Kbuild): an importer's callback has that name, and
 * may be left out by an importer that wants the memory to stay; an exporter can
 * tell, and refuse. UGDS_ANY_MAY_REVOKE: exporters revoke that know no moving.
 */
#if defined(UGDS_INVALIDATE_MAPPINGS) || \
	LINUX_VERSION_CODE >= KERNEL_VERSION(6, 19, 0)
#define UGDS_ANY_MAY_REVOKE true
#else
#define UGDS_ANY_MAY_REVOKE false
#endif

/* Whether a device can raise no interrupt but its own. */
static inline bool ugds_isolated_msi(struct device *dev,
				     struct iommu_group *group)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
	return device_iommu_capable(dev, IOMMU_CAP_INTR_REMAP);
#else
	return iommu_group_has_isolated_msi(group);
#endif
}

/*
 * How memory is mapped that the CPU and the device use at the same time: there
 * is no moment to synchronise, so nothing may have to be. Where the kernel does
 * not know of that wish, ugds_bounced() looks at what it made.
 */
#ifdef DMA_ATTR_REQUIRE_COHERENT
#define UGDS_DMA_ATTRS (DMA_ATTR_SKIP_CPU_SYNC | DMA_ATTR_REQUIRE_COHERENT)
#else
#define UGDS_DMA_ATTRS DMA_ATTR_SKIP_CPU_SYNC
#endif

#endif
