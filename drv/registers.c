// SPDX-License-Identifier: GPL-2.0-only
/*
 * BAR0 in user space. Pages are put in when they are first touched, so that
 * they can be taken out when the device goes: what is touched then gets pages
 * of ones, as registers of a device that has gone read, and nobody is killed.
 */
#include <linux/mm.h>

#include "internal.h"

/* Pages that one fault puts in: all doorbells of most controllers. */
#define AROUND 64

/* The page of ones for that page of the BAR. It lives as long as the file. */
static struct page *page_of_ones(struct ugds_file *file, unsigned long index)
{
	struct page *page = xa_load(&file->ones, index);

	if (page)
		return page;
	page = alloc_page(GFP_KERNEL_ACCOUNT);
	if (!page)
		return NULL;
	memset(page_address(page), 0xff, PAGE_SIZE);
	if (xa_insert(&file->ones, index, page, GFP_KERNEL_ACCOUNT)) {
		__free_page(page);
		return NULL;
	}
	return page;
}

static vm_fault_t insert_registers(struct ugds_file *file,
				   struct vm_area_struct *vma,
				   unsigned long address, unsigned long index)
{
	unsigned long pfn = (file->ud->bar_start >> PAGE_SHIFT) + index;
	unsigned long i, pages;
	vm_fault_t ret;

	ret = vmf_insert_pfn(vma, address, pfn);
	pages = min_t(unsigned long, (vma->vm_end - address) >> PAGE_SHIFT,
		      AROUND);
	for (i = 1; i < pages && ret == VM_FAULT_NOPAGE; i++) {
		if (vmf_insert_pfn(vma, address + i * PAGE_SIZE, pfn + i) !=
		    VM_FAULT_NOPAGE)
			break;	/* it comes by its own fault */
	}
	return ret;
}

static vm_fault_t registers_fault(struct vm_fault *fault)
{
	struct vm_area_struct *vma = fault->vma;
	struct ugds_file *file = vma->vm_private_data;
	unsigned long address = fault->address & PAGE_MASK;
	struct page *page;
	vm_fault_t ret;

	mutex_lock(&file->map_lock);
	if (!file->no_registers) {
		ret = insert_registers(file, vma, address, fault->pgoff);
	} else {
		page = page_of_ones(file, fault->pgoff);
		ret = page ? vmf_insert_pfn_prot(vma, address,
						 page_to_pfn(page),
						 vm_get_page_prot(vma->vm_flags)) :
			     VM_FAULT_OOM;
	}
	mutex_unlock(&file->map_lock);
	return ret;
}

static const struct vm_operations_struct registers_ops = {
	.fault = registers_fault,
};

int ugds_registers_mmap(struct ugds_file *file, struct vm_area_struct *vma)
{
	u64 pages = file->ud->bar_size >> PAGE_SHIFT;

	if (vma->vm_pgoff >= pages || vma_pages(vma) > pages - vma->vm_pgoff)
		return -EINVAL;
	vm_flags_set(vma, VM_IO | VM_PFNMAP | VM_DONTEXPAND | VM_DONTDUMP |
			  VM_DONTCOPY);
	vma->vm_page_prot = pgprot_noncached(vma->vm_page_prot);
	vma->vm_private_data = file;
	vma->vm_ops = &registers_ops;
	return 0;
}

/* Nobody reaches the registers any more when this returns. */
void ugds_registers_away(struct ugds_file *file)
{
	mutex_lock(&file->map_lock);
	file->no_registers = true;
	mutex_unlock(&file->map_lock);
	unmap_mapping_range(file->mapping, UGDS_DRV_MMAP_BAR0,
			    file->ud->bar_size, 1);
}

void ugds_registers_free(struct ugds_file *file)
{
	unsigned long index;
	struct page *page;

	xa_for_each(&file->ones, index, page)
		__free_page(page);
	xa_destroy(&file->ones);
}
