/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the module's files share.
 *
 * Locks, outermost first:
 *	ugds_device.lock	opening, closing, removal, and every request
 *				that changes something
 *	mmap_lock		(the kernel's: user memory is touched, pinned)
 *	ugds_file.map_lock	what mmap may find
 *	a reservation lock	(a DMA-BUF's)
 *	ugds_device.command_lock	the PCI command register
 *	ugds_device.state_lock	state, cause, generation, event
 * A DMA-BUF's owner calls with its reservation lock held: what that call does
 * takes the last two alone, and waits for nobody.
 */
#ifndef UGDS_DRV_INTERNAL_H
#define UGDS_DRV_INTERNAL_H

#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/dma-mapping.h>
#include <linux/interval_tree.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/spinlock.h>
#include <linux/xarray.h>

#include "compat.h"
#include "fault.h"
#include "uapi/ugds_drv.h"

#define UGDS_NAME "ugds_drv"

/* What a user may ask for at once. Nothing depends on the numbers. */
#define UGDS_COHERENT_MAX	(4UL << 20)
#define UGDS_COHERENT_TOTAL	(64UL << 20)
#define UGDS_MAP_MAX		(256UL << 30)
/* Where coherent memory begins for mmap: beyond any BAR0. */
#define UGDS_COHERENT_OFFSET	BIT_ULL(36)

struct ugds_file;

/* One controller. Lives until the last file of it is closed. */
struct ugds_device {
	struct device dev;
	struct cdev cdev;
	struct pci_dev *pdev;
	int minor;

	/* Constant while it is bound. */
	u8 __iomem *registers;		/* CAP to CSTS */
	struct pci_saved_state *saved;	/* its configuration, of probe */
	resource_size_t bar_start;
	resource_size_t bar_size;
	int msix;			/* vectors that the function has */
	int dma_bits;
	bool flr;
	bool translated;		/* an IOMMU has a table of its own for it */
	u32 pci_domain;
	u32 pci_address;

	struct mutex lock;		/* see above, as the next two */
	struct ugds_file *file;		/* the one that has it open */
	bool gone;
	u64 last_token;
	u32 vectors;			/* that the open file may use */

	struct mutex command_lock;	/* the command register */
	spinlock_t state_lock;		/* the rest */
	u64 generation;
	u32 state;
	u32 cause;
	struct eventfd_ctx *event;
};

/* One opening. */
struct ugds_file {
	struct ugds_device *ud;
	struct address_space *mapping;	/* where its mmaps are found */
	struct xarray tokens;		/* struct ugds_mapping by token */
	struct rb_root_cached ranges;	/* of user addresses and DMA-BUFs */
	u64 coherent_bytes;
	u64 next_offset;

	struct ugds_vector *vector;
	u32 vector_count;

	struct mutex map_lock;		/* what mmap and faults look at */
	struct list_head coherent;
	bool no_registers;		/* the device has gone */
	struct xarray ones;		/* what stands for its registers */
};

/*
 * What a token names. `range` is where in its `space` it lies: a process's
 * address space, or a DMA-BUF; coherent memory has none.
 */
struct ugds_mapping {
	const struct ugds_mapping_ops *ops;
	u64 token;
	struct interval_tree_node range;
	const void *space;
	bool revoked;
};

struct ugds_mapping_ops {
	/* 0, or why it cannot be unmapped now */
	int (*may_release)(struct ugds_file *file, struct ugds_mapping *mapping,
			   u32 *reason);
	/* Unmaps and frees. No DMA to it follows. */
	void (*release)(struct ugds_file *file, struct ugds_mapping *mapping);
};

/* A request: the structure is the caller's copy, `made` what it made, if any */
typedef int (*ugds_request)(struct ugds_file *file, void *request, u32 *reason,
			    struct ugds_mapping **made);

/* chardev.c */
extern const struct file_operations ugds_fops;
/* Everything of a file's is given back. The controller has been stopped. */
void ugds_dismantle(struct ugds_file *file);

/* controller.c: stopping it, and keeping it stopped */
void ugds_wedge(struct ugds_device *ud, u32 state, u32 cause);
int ugds_stop(struct ugds_device *ud, bool with_flr, u32 *method,
	      u64 *generation);
int ugds_go(struct ugds_device *ud, u64 generation);
int ugds_request_reset(struct ugds_file *file, void *request, u32 *reason,
		       struct ugds_mapping **made);

/* domain.c: what lies between the device and memory */
bool ugds_is_translated(struct pci_dev *pdev);
bool ugds_is_isolated(struct pci_dev *pdev);
void ugds_forget_translations(struct ugds_device *ud);
bool ugds_bounced(struct ugds_device *ud, dma_addr_t address);
u64 ugds_peer_bytes(struct ugds_device *ud, const u64 *pages, u64 count,
		    struct pci_dev **peer, bool *physical);

/* ledger.c */
int ugds_check_range(u64 begin, u64 length, u32 *reason);
int ugds_ledger_claim(struct ugds_file *file, struct ugds_mapping *mapping,
		      const void *space, u64 begin, u64 length,
		      bool shared_ends, u32 *reason);
void ugds_ledger_forget(struct ugds_file *file, struct ugds_mapping *mapping);
int ugds_ledger_add(struct ugds_file *file, struct ugds_mapping *mapping);
void ugds_ledger_release(struct ugds_file *file, struct ugds_mapping *mapping);
void ugds_ledger_release_all(struct ugds_file *file);
u32 ugds_ledger_state(struct ugds_file *file, u64 token);
int ugds_request_unmap(struct ugds_file *file, void *request, u32 *reason,
		       struct ugds_mapping **made);

/* coherent.c */
int ugds_request_alloc(struct ugds_file *file, void *request, u32 *reason,
		       struct ugds_mapping **made);
int ugds_coherent_mmap(struct ugds_file *file, struct vm_area_struct *vma);

/* map_host.c, map_dmabuf.c, nvidia.c */
int ugds_request_map_host(struct ugds_file *file, void *request, u32 *reason,
			  struct ugds_mapping **made);
int ugds_request_map_dmabuf(struct ugds_file *file, void *request, u32 *reason,
			    struct ugds_mapping **made);
int ugds_request_map_nvidia(struct ugds_file *file, void *request, u32 *reason,
			    struct ugds_mapping **made);
bool ugds_access(u32 access, enum dma_data_direction *direction);

/* registers.c */
int ugds_registers_mmap(struct ugds_file *file, struct vm_area_struct *vma);
void ugds_registers_away(struct ugds_file *file);
void ugds_registers_free(struct ugds_file *file);

/* irq.c */
int ugds_request_interrupts(struct ugds_file *file, void *request, u32 *reason,
			    struct ugds_mapping **made);
int ugds_request_event(struct ugds_file *file, void *request, u32 *reason,
		       struct ugds_mapping **made);
void ugds_vectors_on(struct ugds_device *ud);
void ugds_vectors_off(struct ugds_device *ud);
void ugds_interrupts_off(struct ugds_file *file);
void ugds_event_off(struct ugds_device *ud);

#endif
