/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * The interface of ugds_drv.ko: character devices /dev/ugds_drvN, one for each
 * NVMe controller that is bound to the driver "ugds_drv".
 *
 * The module sets up and then stays out of the way: the opener gets the
 * controller's registers, memory for its queues, DMA addresses for its own
 * memory and for that of peer devices, and interrupts. It never sees a command.
 *
 * Names.  The sysfs class, and so the node's subsystem, is called "ugds_drv".
 * /sys/class/ugds_drv/ugds_drvN/device is the PCI function;
 * /sys/bus/pci/devices/ADDRESS/ugds_drv/ugds_drvN is the way back.
 *
 * Opening.  One file at a time: EBUSY. EPERM without CAP_SYS_RAWIO, or in a
 * kernel that is locked down, unless the IOMMU translates this function's
 * addresses, keeps its interrupts apart, and the function is alone in its IOMMU
 * group. ENODEV: it has been removed. EIO: the controller does not stop. A
 * successful opening finds the controller disabled (CSTS.RDY is 0), bus
 * mastering on, and no interrupt set.
 *
 * Closing.  The last close of the file (a killed process included) turns bus
 * mastering off, disables the controller, and resets the function where it does
 * not obey within CAP.TO; only then is memory unmapped and unpinned. It can
 * therefore take as long as CAP.TO says. A file that is shared by processes is
 * closed when the last of them has closed it and unmapped what it mapped.
 *
 * Requests.  Each takes a pointer to its structure. `argsz` is the structure's
 * size as the caller knows it; bytes beyond what the kernel knows have to be 0
 * (E2BIG), fewer than in version 1 are refused (EINVAL). `flags` that the
 * kernel does not know are refused (EINVAL), and so are unknown values and
 * reserved fields that are not 0. All structures are the same for 32-bit and
 * 64-bit callers.
 *
 * Errors.  `reason` (enum ugds_drv_reason) is written in success and failure
 * alike, unless the structure itself could not be read (EFAULT, EINVAL for
 * argsz, E2BIG). ENODEV everywhere: the device has been removed; everything of
 * the file's was unmapped then. GET_INFO and GET_STATE answer even so.
 *
 * Threads.  Every request may be made by any thread. Those that change
 * something wait for one another; GET_INFO and GET_STATE wait for nothing.
 *
 * Revocation.  The owner of a DMA-BUF may take its memory away, or move it.
 * Before its call into this module returns, the function's bus mastering is
 * off, its controller disabled, and the mapping's addresses are no longer
 * valid. The file is then WEDGED: registers can be read, memory can be unmapped
 * and mapped, but nothing moves until RESET succeeds. Tokens of revoked
 * mappings remain until UNMAP.
 */
#ifndef _UAPI_UGDS_DRV_H
#define _UAPI_UGDS_DRV_H

#include <linux/const.h>
#include <linux/ioctl.h>
#include <linux/types.h>

/*
 * Raised when something changes that an older library would get wrong. What is
 * only added shows in `capabilities`, and by a longer structure.
 */
#define UGDS_DRV_API_VERSION 1

/* The unit of every address and length. */
#define UGDS_DRV_PAGE_SIZE 4096

enum ugds_drv_state {
	UGDS_DRV_STATE_LIVE = 0,
	/* Bus mastering is off and the controller disabled, until RESET. */
	UGDS_DRV_STATE_WEDGED = 1,
	/* Removed, or unbound from the driver: registers read as ones. Or the
	 * system shuts down. Final.
	 */
	UGDS_DRV_STATE_GONE = 2,
};

/* Why a request failed, or what wedged the file. Numbers are never reused. */
enum ugds_drv_reason {
	UGDS_DRV_REASON_NONE = 0,

	/* What made a file WEDGED or GONE. */
	/* The owner of a DMA-BUF took memory away. */
	UGDS_DRV_REASON_REVOKED = 1,
	/* Someone reset the function by sysfs, or its bus. */
	UGDS_DRV_REASON_SYSTEM_RESET = 2,
	UGDS_DRV_REASON_SUSPENDED = 3,
	/* The PCI core reported an error of the function or of its link. */
	UGDS_DRV_REASON_PCI_ERROR = 4,
	UGDS_DRV_REASON_REMOVED = 5,
	/* RESET could not make the controller stop. */
	UGDS_DRV_REASON_NOT_STOPPED = 6,

	/* Why a request failed. */
	/* A flag, a value, or a reserved field that is not known. EINVAL */
	UGDS_DRV_REASON_ARGUMENT = 16,
	/* Not a multiple of the page size, zero, or it wraps around. EINVAL */
	UGDS_DRV_REASON_RANGE = 17,
	/* It overlaps a mapping of this file. EEXIST */
	UGDS_DRV_REASON_OVERLAP = 18,
	/* RLIMIT_MEMLOCK, or a limit that GET_INFO tells. ENOMEM */
	UGDS_DRV_REASON_LIMIT = 19,
	/* The kernel has no memory for it. ENOMEM */
	UGDS_DRV_REASON_MEMORY = 20,
	/* Not memory that can be pinned for long: unmapped, or I/O. EFAULT */
	UGDS_DRV_REASON_UNPINNABLE = 21,
	/* The DMA layer would not map it. EIO */
	UGDS_DRV_REASON_DMA = 22,
	/* It would go through a bounce buffer, which commands cannot. EOPNOTSUPP */
	UGDS_DRV_REASON_BOUNCED = 23,
	/* `pages`, or another array, cannot be read or written. EFAULT */
	UGDS_DRV_REASON_ARRAY = 24,
	/* No mapping has this token. ENOENT */
	UGDS_DRV_REASON_TOKEN = 25,
	/* Coherent memory that is still mapped by mmap. EBUSY */
	UGDS_DRV_REASON_MAPPED = 26,
	/* The descriptor is not a DMA-BUF, or not an eventfd. EBADF, EINVAL */
	UGDS_DRV_REASON_DESCRIPTOR = 27,
	/* The range ends beyond the DMA-BUF's end. EINVAL */
	UGDS_DRV_REASON_BEYOND_END = 28,
	/* The exporter would not attach this device: typically, no peer-to-peer
	 * way leads between the two. The exporter's error
	 */
	UGDS_DRV_REASON_ATTACH = 29,
	/* No IOMMU translates, so the memory must not move under the device, and
	 * the exporter will not pin it. EOPNOTSUPP
	 */
	UGDS_DRV_REASON_CANNOT_PIN = 30,
	/* Earlier work on the memory did not finish in time. ETIMEDOUT */
	UGDS_DRV_REASON_FENCE = 31,
	/* The exporter, or the DMA layer, would not map the attachment:
	 * typically, the two are not below a host bridge that is known to
	 * forward between them. The exporter's error
	 */
	UGDS_DRV_REASON_EXPORTER = 32,
	/* Its pieces do not begin and end at multiples of a page. EINVAL */
	UGDS_DRV_REASON_PIECES = 33,
	/* REQUIRE_PEER, and some of it is not a peer's memory. EXDEV */
	UGDS_DRV_REASON_NOT_PEER = 34,
	/* It was revoked while it was being mapped. ESTALE */
	UGDS_DRV_REASON_STALE = 35,
	/* More interrupts than GET_INFO tells. EINVAL; or the kernel had none
	 * left for it. Its error
	 */
	UGDS_DRV_REASON_VECTORS = 36,
	/* The kernel or the module was built without it. EOPNOTSUPP */
	UGDS_DRV_REASON_NOT_BUILT = 37,
	/* Revoked again during RESET: call it again. EAGAIN */
	UGDS_DRV_REASON_AGAIN = 38,
};

/* What the device may do to memory. Its writes are the data of reads. */
enum ugds_drv_access {
	UGDS_DRV_ACCESS_READ = 1,	/* it only reads */
	UGDS_DRV_ACCESS_READ_WRITE = 3,
};

/*
 * GET_INFO: the handshake, and what does not change while the file is open.
 * Check api_version before anything else.
 */
struct ugds_drv_info {
	__u32 argsz;
	__u32 flags;			/* in: 0 */
	__u32 api_version;
	__u32 reason;
	__u64 capabilities;
/* An IOMMU translates: the device reaches only what is mapped. Otherwise
 * addresses are physical, and nothing keeps the device from any of them.
 */
#define UGDS_DRV_CAP_TRANSLATED		_BITULL(0)
/* The function can be reset by itself (FLR). */
#define UGDS_DRV_CAP_FLR		_BITULL(1)
#define UGDS_DRV_CAP_DMABUF		_BITULL(2)
/* The kernel can map peers' memory below one switch or host bridge. */
#define UGDS_DRV_CAP_P2PDMA		_BITULL(3)
#define UGDS_DRV_CAP_NVIDIA_P2P		_BITULL(4)
/* The module's fault points are built in: for tests only. */
#define UGDS_DRV_CAP_FAULTS		_BITULL(5)
	__u32 pci_domain;
	__u32 pci_address;		/* bus << 8 | device << 3 | function */
	__u32 state;			/* enum ugds_drv_state, now */
	__u32 vectors;			/* MSI-X vectors to be had; or 0 */
	__u64 bar_size;			/* of BAR0, in bytes */
	__u64 bar_offset;		/* for mmap */
	__u32 dma_bits;			/* of an address; 64 as a rule */
	__u32 reserved;
	__u64 coherent_max;		/* bytes of one ALLOC_COHERENT */
	__u64 coherent_total;		/* bytes of all of a file's */
	__u64 map_max;			/* bytes of one mapping */
};

/*
 * mmap of the file. PROT_READ and PROT_WRITE as wished, never PROT_EXEC, only
 * MAP_SHARED; not inherited by fork. Bounds are exact: EINVAL.
 *
 * BAR0 is at UGDS_DRV_MMAP_BAR0, uncached, any range of pages of it. A BAR that
 * is smaller than a page cannot be mapped. When the device is removed the
 * mapping stays: registers read as ones, and a word written then keeps what was
 * written.
 *
 * Coherent memory is at the offset that ALLOC_COHERENT returned, from its
 * beginning and no further than its end. Its contents outlive the device.
 */
#define UGDS_DRV_MMAP_BAR0	0ULL

/*
 * ALLOC_COHERENT: zeroed memory for queues and lists. Its DMA addresses are
 * contiguous, and dma_address is a multiple of its size rounded up to a power
 * of two, or of 64 KiB if that is less. This is the way to rings that are
 * longer than a page, with or without an IOMMU. Errors: RANGE, LIMIT, MEMORY,
 * DMA, BOUNCED.
 */
struct ugds_drv_alloc {
	__u32 argsz;
	__u32 flags;			/* in: 0 */
	__u64 length;			/* in: multiple of the page size */
	__u64 dma_address;
	__u64 mmap_offset;
	__u64 token;
	__u32 reason;
	__u32 reserved;
};

/*
 * MAP_HOST: pins memory of the calling process and maps it. It counts against
 * RLIMIT_MEMLOCK, unless the caller has CAP_IPC_LOCK.
 *
 * What is promised of `pages`: entry i is the DMA address of the 4 KiB that
 * begin at address + i * 4096; each is a multiple of 4096. Nothing is promised
 * about neighbouring entries, nor that addresses are congruent to virtual ones
 * beyond 4 KiB: where an IOMMU translates they usually follow one another, and
 * where none does they are physical. (PRP entries of a controller with 4 KiB
 * pages need no more. One whose CC.MPS is larger needs the caller to look.)
 *
 * The range may not overlap another of this process's that is mapped through
 * this file (OVERLAP), but for its first and its last page, if SHARED_ENDS says
 * so: buffers that share no byte may share the page in which one ends and the
 * next begins. Errors besides: RANGE, LIMIT, MEMORY, UNPINNABLE, DMA,
 * BOUNCED, ARRAY; EINTR for a fatal signal. After an error nothing is mapped;
 * `pages` may have been written.
 */
struct ugds_drv_map_host {
	__u32 argsz;
	__u32 flags;
#define UGDS_DRV_MAP_SHARED_ENDS	_BITUL(0)
	__u64 address;			/* in: multiple of the page size */
	__u64 length;			/* in: multiple of the page size */
	__u64 pages;			/* in: __u64[length / 4096] */
	__u64 token;			/* never 0, never used again */
	__u32 access;			/* in: enum ugds_drv_access */
	__u32 reason;
};

enum ugds_drv_placement {
	/* Every page is in a BAR of another PCI device: of `peer` */
	UGDS_DRV_PLACEMENT_PEER = 1,
	/* Some or all of it is not shown to be: the exporter keeps it, or has
	 * moved it, to host memory. Not a direct route to a GPU.
	 */
	UGDS_DRV_PLACEMENT_HOST = 2,
};

enum ugds_drv_holding {
	/* The exporter may take it away, which stops the controller. (What a
	 * kernel's exporters never do is REVOCABLE, too, where it does not say)
	 */
	UGDS_DRV_HOLDING_REVOCABLE = 1,
	/* The exporter was asked to keep it where it is, and does */
	UGDS_DRV_HOLDING_PINNED = 2,
	/* The exporter moves nothing: it stays as long as it is mapped */
	UGDS_DRV_HOLDING_STATIC = 3,
};

/*
 * MAP_DMABUF: imports a range of a DMA-BUF. `pages` as in MAP_HOST. The range
 * may not overlap another of the same DMA-BUF's (OVERLAP), with SHARED_ENDS as
 * in MAP_HOST. The descriptor can be closed afterwards. Waits at most 5 seconds
 * for earlier work on the memory.
 *
 * Where no IOMMU translates a stale address would reach whoever has the memory
 * next, so the exporter has to pin it (CANNOT_PIN), unless ALLOW_REVOCABLE says
 * that the caller makes sure that no command names it after a revocation. Where
 * one translates the mapping is revocable, and stale addresses fault.
 *
 * Errors: ARGUMENT, RANGE, DESCRIPTOR, BEYOND_END, OVERLAP, ATTACH, CANNOT_PIN,
 * FENCE, EXPORTER, PIECES, NOT_PEER, STALE, MEMORY, LIMIT, ARRAY, NOT_BUILT.
 */
struct ugds_drv_map_dmabuf {
	__u32 argsz;
	__u32 flags;
/* Refuse (NOT_PEER) unless all of it is shown to be a peer's memory. */
#define UGDS_DRV_DMABUF_REQUIRE_PEER	_BITUL(0)
#define UGDS_DRV_DMABUF_ALLOW_REVOCABLE	_BITUL(1)
#define UGDS_DRV_DMABUF_SHARED_ENDS	_BITUL(2)
	__u64 offset;			/* in: multiple of the page size */
	__u64 length;			/* in: multiple of the page size */
	__u64 pages;			/* in: __u64[length / 4096] */
	__u64 token;
	__s32 fd;			/* in */
	__u32 access;			/* in: enum ugds_drv_access */
	__u32 reason;
	__u32 placement;		/* enum ugds_drv_placement */
	__u32 holding;			/* enum ugds_drv_holding */
	__u32 peer_domain;		/* of the first page, if PEER */
	__u32 peer_address;		/* bus << 8 | device << 3 | function */
	/* 1: addresses are physical or of the bus; no IOMMU translates them */
	__u32 physical;
	__u64 peer_bytes;		/* how much of it is shown to be a peer's */
};

/*
 * MAP_NVIDIA: pins GPU memory by the NVIDIA driver's peer-memory interface, for
 * drivers without DMA-BUF export. Address and length are multiples of 64 KiB.
 * `pages` are of 4 KiB as everywhere. The driver keeps it until UNMAP. Errors as
 * MAP_HOST, and NOT_BUILT, EXPORTER, PIECES.
 */
struct ugds_drv_map_nvidia {
	__u32 argsz;
	__u32 flags;			/* in: 0 */
	__u64 address;
	__u64 length;
	__u64 pages;
	__u64 token;
	__u32 access;
	__u32 reason;
};

/*
 * UNMAP: gives back what ALLOC_COHERENT or a MAP request made. No command in
 * flight may name it: where no IOMMU translates, the memory is anyone's when
 * this returns. Coherent memory has to be munmapped before (MAPPED).
 * Errors: TOKEN, MAPPED.
 */
struct ugds_drv_unmap {
	__u32 argsz;
	__u32 flags;			/* in: 0 */
	__u64 token;
	__u32 reason;
	__u32 reserved;
};

/*
 * SET_INTERRUPTS: MSI-X vector i is delivered to eventfds[i], an eventfd or -1
 * for none; vectors beyond `count` are not. Replaces what was set before; 0
 * ends all. After an error nothing is set. To be called before completion
 * queues name a vector. Errors: VECTORS, ARRAY, DESCRIPTOR, MEMORY.
 */
struct ugds_drv_interrupts {
	__u32 argsz;
	__u32 flags;			/* in: 0 */
	__u64 eventfds;			/* in: __s32[count] */
	__u32 count;
	__u32 reason;
};

enum ugds_drv_reset_method {
	UGDS_DRV_RESET_DISABLE = 1,	/* CC.EN=0, and CSTS.RDY became 0 */
	UGDS_DRV_RESET_FLR = 2,		/* the function was reset */
};

/*
 * RESET: bus mastering off, CC.EN=0, and if the controller does not follow
 * within CAP.TO, or FLR is asked for, a reset of the function where it has one.
 * When it is known to have stopped, bus mastering is on again and the file
 * LIVE; the controller is disabled, admin queue registers are lost, mappings
 * and interrupts are kept. `stopped` is 1 if the controller is known to have
 * stopped: nothing that was in flight moves any more. EIO, NOT_STOPPED: it is
 * not; bus mastering stays off.
 */
struct ugds_drv_reset {
	__u32 argsz;
	__u32 flags;
#define UGDS_DRV_RESET_WITH_FLR		_BITUL(0)
	__u32 stopped;
	__u32 method;			/* enum ugds_drv_reset_method, or 0 */
	__u32 reason;
	__u32 reserved;
};

/*
 * SET_EVENT_FD: an eventfd that is told of each change to WEDGED or GONE; -1
 * ends that. Errors: DESCRIPTOR.
 */
struct ugds_drv_event {
	__u32 argsz;
	__u32 flags;			/* in: 0 */
	__s32 fd;
	__u32 reason;
};

enum ugds_drv_mapping_state {
	UGDS_DRV_MAPPING_UNKNOWN = 0,	/* no mapping has this token */
	UGDS_DRV_MAPPING_LIVE = 1,
	UGDS_DRV_MAPPING_REVOKED = 2,
};

/* GET_STATE: what has happened, and what became of one mapping. */
struct ugds_drv_status {
	__u32 argsz;
	__u32 flags;			/* in: 0 */
	__u64 token;			/* in: a mapping's, or 0 */
	__u64 generation;		/* of wedgings: grows with each */
	__u32 state;			/* enum ugds_drv_state */
	__u32 cause;			/* of the last change to it: a reason */
	__u32 mapping;			/* enum ugds_drv_mapping_state */
	__u32 reason;
};

#define UGDS_DRV_IOC_TYPE		0xd6

#define UGDS_DRV_GET_INFO		_IO(UGDS_DRV_IOC_TYPE, 0)
#define UGDS_DRV_GET_STATE		_IO(UGDS_DRV_IOC_TYPE, 1)
#define UGDS_DRV_ALLOC_COHERENT		_IO(UGDS_DRV_IOC_TYPE, 2)
#define UGDS_DRV_MAP_HOST		_IO(UGDS_DRV_IOC_TYPE, 3)
#define UGDS_DRV_MAP_DMABUF		_IO(UGDS_DRV_IOC_TYPE, 4)
#define UGDS_DRV_MAP_NVIDIA		_IO(UGDS_DRV_IOC_TYPE, 5)
#define UGDS_DRV_UNMAP			_IO(UGDS_DRV_IOC_TYPE, 6)
#define UGDS_DRV_SET_INTERRUPTS		_IO(UGDS_DRV_IOC_TYPE, 7)
#define UGDS_DRV_RESET			_IO(UGDS_DRV_IOC_TYPE, 8)
#define UGDS_DRV_SET_EVENT_FD		_IO(UGDS_DRV_IOC_TYPE, 9)

#endif
