/* SPDX-License-Identifier: Apache-2.0 */
/*
 * uGDS: moves bytes between NVMe SSDs and memory under user-space control.
 *
 * The calls of the released library keep their binary interface; what is marked "extension" is ours. All functions are
 * thread-safe. Offsets and sizes are bytes. Reads and writes return the byte count or a negative errno; the others
 * return a uGDSError_t whose `err` is UGDS_SUCCESS or a code of 5000 and above. After any failure,
 * uGDSGetLastError() has the operation, device, range, cause and remedy in words, for the calling thread.
 */
#ifndef UGDS_H
#define UGDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

struct iovec;    /* <sys/uio.h> */
struct timespec; /* not declared by <time.h> in strict C99 */

#ifdef __cplusplus
extern "C" {
#endif

#define UGDS_API __attribute__((visibility("default")))

#define UGDS_VERSION_MAJOR 0
#define UGDS_VERSION_MINOR 1
#define UGDS_VERSION_PATCH 0

typedef enum uGDSOpError {
  UGDS_SUCCESS = 0,
  UGDS_DRIVER_NOT_INITIALIZED = 5001,
  UGDS_DRIVER_INVALID_PROPS = 5002,
  UGDS_DRIVER_UNSUPPORTED_LIMIT = 5003,
  UGDS_DRIVER_VERSION_MISMATCH = 5004,
  UGDS_DRIVER_VERSION_READ_ERROR = 5005,
  UGDS_DRIVER_CLOSING = 5006,
  UGDS_PLATFORM_NOT_SUPPORTED = 5007,
  UGDS_IO_NOT_SUPPORTED = 5008,
  UGDS_DEVICE_NOT_SUPPORTED = 5009,
  UGDS_DRIVER_ERROR = 5010,
  UGDS_CUDA_DRIVER_ERROR = 5011,
  UGDS_CUDA_POINTER_INVALID = 5012,
  UGDS_CUDA_MEMORY_TYPE_INVALID = 5013,
  UGDS_CUDA_POINTER_RANGE_ERROR = 5014,
  UGDS_CUDA_CONTEXT_MISMATCH = 5015,
  UGDS_INVALID_MAPPING_SIZE = 5016,
  UGDS_INVALID_MAPPING_RANGE = 5017,
  UGDS_INVALID_FILE_TYPE = 5018,
  UGDS_INVALID_FILE_OPEN_FLAG = 5019,
  UGDS_DIO_NOT_SET = 5020,
  UGDS_INVALID_VALUE = 5022,
  UGDS_MEMORY_ALREADY_REGISTERED = 5023,
  UGDS_MEMORY_NOT_REGISTERED = 5024,
  UGDS_PERMISSION_DENIED = 5025,
  UGDS_DRIVER_ALREADY_OPEN = 5026,
  UGDS_HANDLE_NOT_REGISTERED = 5027,
  UGDS_HANDLE_ALREADY_REGISTERED = 5028,
  UGDS_DEVICE_NOT_FOUND = 5029,
  UGDS_INTERNAL_ERROR = 5030,
  UGDS_GETNEWFD_FAILED = 5031,
  UGDS_IO_DISABLED = 5034,
  UGDS_MEMORY_PINNING_FAILED = 5036,
  UGDS_BATCH_CAPACITY_EXCEEDED = 5040,
  UGDS_RDMA_REGION_ACTIVE = 5041,
  UGDS_BUSY = 5042,
  UGDS_OUT_OF_MEMORY = 5043,
  UGDS_DEVICE_LOST = 5049, /* extension */
  UGDS_TIMED_OUT = 5054    /* extension */
} uGDSOpError;

/* `cu_err` is the GPU runtime's own code where `err` is UGDS_CUDA_DRIVER_ERROR, else 0. */
typedef struct uGDSError {
  int err;
  int cu_err;
} uGDSError_t;

typedef void* uGDSHandle_t;

enum {
  UGDS_HANDLE_TYPE_OPAQUE_FD = 1, /* handle.fd: /dev/ugds_drvN, a file or a block device */
  /* handle.handle: a const char* URI (extension), such as "pci:0000:65:00.0", "vfio-user:/run/ssd" or "emulated:1GiB".
   * `?interrupts=1` in it, or UGDS_INTERRUPT_MODE=1 in the environment for every handle that does not say otherwise,
   * has waits sleep until the device interrupts; a queue that has no interrupt is polled. */
  UGDS_HANDLE_TYPE_USERSPACE_FS = 3
};

typedef struct uGDSDescr {
  int type;
  union {
    int fd;
    void* handle;
  } handle;
} uGDSDescr_t;

typedef struct uGDSBufConfig {
  int backend;
  bool enable_export;
} uGDSBufConfig_t;

enum {
  UGDS_BUF_DMABUF = 1, /* export through DMA-BUF (HIP) */
  UGDS_BUF_RDMA = 2,   /* keep the descriptor for RDMA */
  UGDS_BUF_FORCE_CUDA = 4
};

/* The memory is [offset, offset + length) of the descriptor, which is the caller's to close. */
typedef struct uGDSDmabufExport {
  int fd;
  uint64_t offset;
  size_t length;
} uGDSDmabufExport_t;

/* `mr` is libibverbs's struct ibv_mr *, `iova` the address by which requests name the memory. */
typedef struct uGDSRDMARegion {
  void* mr;
  uint64_t iova;
  uint32_t lkey;
  uint32_t rkey;
  uint64_t token;
} uGDSRDMARegion_t;

typedef void* uGDSBatchHandle_t;

typedef struct uGDSIOParams {
  void* base;
  off_t file_offset;
  off_t buf_offset;
  size_t size;
  int opcode; /* 0 read, 1 write */
  void* cookie;
} uGDSIOParams_t;

/* Of a batch's request. Waiting and pending are not told: events are of requests that have ended. */
typedef enum uGDSBatchStatus {
  UGDS_BATCH_WAITING = 0x01,
  UGDS_BATCH_PENDING = 0x02,
  UGDS_BATCH_INVALID = 0x04,
  UGDS_BATCH_CANCELED = 0x08, /* extension */
  UGDS_BATCH_COMPLETE = 0x10,
  UGDS_BATCH_TIMEOUT = 0x20,
  UGDS_BATCH_FAILED = 0x40
} uGDSBatchStatus_t;

typedef struct uGDSIOEvents {
  void* cookie;
  int status;
  ssize_t ret;
} uGDSIOEvents_t;

/* Opens and closes are counted. Nothing is set up here; devices are set up when their handles are registered. */
UGDS_API uGDSError_t uGDSDriverOpen(void);
/* The last close deregisters what is left. UGDS_BUSY while requests run, UGDS_RDMA_REGION_ACTIVE while a buffer has
 * such regions; then what is in use stays registered, and the driver open. */
UGDS_API uGDSError_t uGDSDriverClose(void);

/* Opens the device that `descr` names. UGDS_DRIVER_NOT_INITIALIZED, UGDS_INVALID_VALUE, UGDS_INVALID_FILE_TYPE,
 * UGDS_DEVICE_NOT_FOUND, UGDS_OUT_OF_MEMORY, ... */
UGDS_API uGDSError_t uGDSHandleRegister(uGDSHandle_t* fh, const uGDSDescr_t* descr);
/* Waits for requests that run, then closes. Where that is refused (a wedged device), the handle stays. */
UGDS_API void uGDSHandleDeregister(uGDSHandle_t fh);
/* timeout_s: 0 closes at once if nothing is in use, above 0 waits for at most so many seconds, -1 for as long as it
 * takes, below -1 releases by force after a reset of the device's function. What is overdue meanwhile is aborted.
 * UGDS_BUSY while it is in use; then nothing has changed. */
UGDS_API uGDSError_t uGDSHandleDeregisterEx(uGDSHandle_t fh, int timeout_s);
/* Bytes of the namespace. */
UGDS_API uGDSError_t uGDSGetDeviceCapacity(uGDSHandle_t fh, uint64_t* bytes);

/* Pins [base, base + size) and maps it to every registered handle, and to those registered later. Any alignment, any
 * size. UGDS_MEMORY_ALREADY_REGISTERED where it overlaps another registration. */
UGDS_API uGDSError_t uGDSBufRegister(const void* base, size_t size, int flags);
UGDS_API uGDSError_t uGDSBufRegisterEx(const void* base, size_t size, const uGDSBufConfig_t* config);
/* Page-aligned, zeroed memory that every transport can reach, which malloc's is not for "vfio-user:"; to be registered
 * as any other. NULL where there is none. Freed while it is registered: UGDS_BUSY, and nothing has changed. Not
 * inherited by fork. (extension) */
UGDS_API void* uGDSHostAlloc(size_t size);
UGDS_API uGDSError_t uGDSHostFree(void* memory);
/* `base` is what was registered. UGDS_BUSY while commands on it are in flight; then nothing has changed. */
UGDS_API uGDSError_t uGDSBufDeregister(const void* base);

/* Read the device into memory, or write memory to the device. `buf + buf_offset` lies in a registered buffer, interior
 * pointers included. `file_offset` and `size` are multiples of the block size, the memory is aligned to 4 bytes. Bytes,
 * or a negative errno: -EINVAL (alignment, not registered, beyond the buffer), -ERANGE (beyond the device), -EBADF
 * (handle), -ETIMEDOUT, -ENODEV (device lost), -EIO, ... */
UGDS_API ssize_t uGDSRead(uGDSHandle_t fh, void* buf, size_t size, off_t file_offset, off_t buf_offset);
UGDS_API ssize_t uGDSWrite(uGDSHandle_t fh, const void* buf, size_t size, off_t file_offset, off_t buf_offset);
/* Extension: makes every completed write durable. 0, or a negative errno: -EIO once after a reset that may have lost
 * completed writes, as docs/failures.md says. */
UGDS_API ssize_t uGDSFlush(uGDSHandle_t fh);
/* Extension: deallocates blocks. 0, or a negative errno. */
UGDS_API ssize_t uGDSDiscard(uGDSHandle_t fh, off_t file_offset, size_t size);

/* Extension: the same between one range of the device, from `file_offset`, and `count` pieces of registered memory, in
 * order. Each piece is a multiple of the block size. */
UGDS_API ssize_t uGDSReadv(uGDSHandle_t fh, const struct iovec* vector, int count, off_t file_offset);
UGDS_API ssize_t uGDSWritev(uGDSHandle_t fh, const struct iovec* vector, int count, off_t file_offset);

/* Makes a batch that holds up to `nr` requests which are submitted and whose events are not yet read. Several on one
 * handle are independent. All memory is made here. UGDS_INVALID_VALUE, UGDS_HANDLE_NOT_REGISTERED, UGDS_OUT_OF_MEMORY.
 */
UGDS_API uGDSError_t uGDSBatchIOSetUp(uGDSBatchHandle_t* batch, uGDSHandle_t fh, unsigned nr);
/* Gives `nr` requests to the device, in one doorbell as far as its queue has room; where it has not, waits for room.
 * All or nothing: UGDS_BATCH_CAPACITY_EXCEEDED, and UGDS_INVALID_VALUE for a malformed request (null buffer, size 0,
 * not whole blocks, opcode), leave nothing submitted. What else is wrong with a request (buffer not registered, range
 * beyond it or beyond the device) is told by its event. `flags` is 0. */
UGDS_API uGDSError_t uGDSBatchIOSubmit(uGDSBatchHandle_t batch, unsigned nr, uGDSIOParams_t* params, unsigned flags);
/* Waits until `min_nr` events are there, or as many as there can be, or for `timeout` (NULL: for ever), and writes up
 * to *nr of them (0: as many as the batch holds), in the order in which requests ended; *nr becomes how many. Each
 * event is told once: UGDS_BATCH_COMPLETE with the bytes in `ret`, or UGDS_BATCH_FAILED, UGDS_BATCH_TIMEOUT or
 * UGDS_BATCH_CANCELED with a negative errno; uGDSGetLastError() then has the last of them in words. */
UGDS_API uGDSError_t uGDSBatchIOGetStatus(uGDSBatchHandle_t batch, unsigned min_nr, unsigned* nr,
                                          uGDSIOEvents_t* events, struct timespec* timeout);
/* Extension: takes back what was not yet given to the device; it ends as UGDS_BATCH_CANCELED. */
UGDS_API uGDSError_t uGDSBatchIOCancel(uGDSBatchHandle_t batch);
/* Waits for what is in flight, and frees the batch. Events that were not read are gone. */
UGDS_API void uGDSBatchIODestroy(uGDSBatchHandle_t batch);

/* The same in the order of a GPU's stream: what is enqueued on `stream` (a CUstream or hipStream_t; NULL is the default
 * stream) next runs after it. Returns at once. `*size`, `*file_offset` and `*buf_offset` are read when the stream gets
 * there; a size is at most what it is at the call. `*done` gets bytes or a negative errno before the stream goes on;
 * all four stay where they are until then. UGDS_MEMORY_NOT_REGISTERED; UGDS_IO_NOT_SUPPORTED while the stream is being
 * captured into a graph, and where there is no GPU; UGDS_BUSY while the stream has no room for long, UGDS_OUT_OF_MEMORY
 * while other streams use all memory to stage through. */
UGDS_API uGDSError_t uGDSReadAsync(uGDSHandle_t fh, void* buf, size_t* size, off_t* file_offset, off_t* buf_offset,
                                   ssize_t* done, void* stream);
UGDS_API uGDSError_t uGDSWriteAsync(uGDSHandle_t fh, void* buf, size_t* size, off_t* file_offset, off_t* buf_offset,
                                    ssize_t* done, void* stream);
/* Makes a stream known, so that its first request costs no more than others. backend: 0 any, 1 CUDA, 2 HIP. */
UGDS_API uGDSError_t uGDSStreamRegister(void* stream);
UGDS_API uGDSError_t uGDSStreamRegisterEx(void* stream, int backend);
/* Waits until the requests on it have ended, and reports the first error of one that was not reported here yet: its
 * code, and its words by uGDSGetLastError(). The stream may be used again. UGDS_INVALID_VALUE where it was never used.
 */
UGDS_API uGDSError_t uGDSStreamDeregister(void* stream);
/* A DMA-BUF of a registered GPU buffer, for other devices. UGDS_IO_NOT_SUPPORTED with what every exporter said. */
UGDS_API uGDSError_t uGDSExportDmabuf(const void* base, uGDSDmabufExport_t* out);
/* A registered GPU buffer as a memory region of `pd`, a struct ibv_pd *, by the libibverbs that is found when the
 * program runs. Until it is unregistered the buffer cannot be (UGDS_RDMA_REGION_ACTIVE). */
UGDS_API uGDSError_t uGDSRDMARegister(const void* base, void* pd, int access_flags, uGDSRDMARegion_t* region);
/* `base` is what it was registered with; UGDS_INVALID_VALUE for any other, and for a region that is not registered. */
UGDS_API uGDSError_t uGDSRDMAUnregister(const void* base, uGDSRDMARegion_t* region);

/* Extension: has `callback` called with each line that the library logs: one event of a device, in JSON (its fields are
 * in docs/failures.md), terminated by NUL. level: 0 info, 1 warning, 2 error. One line after the other, by a thread of
 * the library's: the callback may not call the library, but for this function, and may take its time. NULL: none. When
 * this returns, the callback before it is not running any more, unless it is called by that. */
typedef void (*uGDSLogCallback_t)(int level, const char* line, void* context);
UGDS_API void uGDSSetLogCallback(uGDSLogCallback_t callback, void* context);

/* 10000 * major + 100 * minor + patch. */
UGDS_API int uGDSVersion(void);
/* Extension: the calling thread's last error in words, cut to fit and always terminated. Returns its full length
 * without the terminator, 0 if there was none. */
UGDS_API size_t uGDSGetLastError(char* text, size_t size);

#ifdef __cplusplus
}
#endif

#endif /* UGDS_H */
