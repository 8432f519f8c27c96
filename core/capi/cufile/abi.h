/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The binary interface of cuFile 1.15 on 64-bit machines: names, numbers and layouts as programs that were built for it
 * have them. Programs are compiled with NVIDIA's own header; this one is for the library that answers them, and for its
 * tests. docs/cufile.md says what each function does here.
 */
#ifndef UGDS_CUFILE_ABI_H
#define UGDS_CUFILE_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CUFILE_API __attribute__((visibility("default")))

/* What cuFileGetVersion gives: 1000 * major + 10 * minor. */
enum { CUFILE_ABI_VERSION = 1150 };

typedef enum CUfileOpError {
  CU_FILE_SUCCESS = 0,
  CU_FILE_DRIVER_NOT_INITIALIZED = 5001,
  CU_FILE_DRIVER_INVALID_PROPS = 5002,
  CU_FILE_DRIVER_UNSUPPORTED_LIMIT = 5003,
  CU_FILE_DRIVER_VERSION_MISMATCH = 5004,
  CU_FILE_DRIVER_VERSION_READ_ERROR = 5005,
  CU_FILE_DRIVER_CLOSING = 5006,
  CU_FILE_PLATFORM_NOT_SUPPORTED = 5007,
  CU_FILE_IO_NOT_SUPPORTED = 5008,
  CU_FILE_DEVICE_NOT_SUPPORTED = 5009,
  CU_FILE_NVFS_DRIVER_ERROR = 5010,
  CU_FILE_CUDA_DRIVER_ERROR = 5011,
  CU_FILE_CUDA_POINTER_INVALID = 5012,
  CU_FILE_CUDA_MEMORY_TYPE_INVALID = 5013,
  CU_FILE_CUDA_POINTER_RANGE_ERROR = 5014,
  CU_FILE_CUDA_CONTEXT_MISMATCH = 5015,
  CU_FILE_INVALID_MAPPING_SIZE = 5016,
  CU_FILE_INVALID_MAPPING_RANGE = 5017,
  CU_FILE_INVALID_FILE_TYPE = 5018,
  CU_FILE_INVALID_FILE_OPEN_FLAG = 5019,
  CU_FILE_DIO_NOT_SET = 5020,
  CU_FILE_INVALID_VALUE = 5022,
  CU_FILE_MEMORY_ALREADY_REGISTERED = 5023,
  CU_FILE_MEMORY_NOT_REGISTERED = 5024,
  CU_FILE_PERMISSION_DENIED = 5025,
  CU_FILE_DRIVER_ALREADY_OPEN = 5026,
  CU_FILE_HANDLE_NOT_REGISTERED = 5027,
  CU_FILE_HANDLE_ALREADY_REGISTERED = 5028,
  CU_FILE_DEVICE_NOT_FOUND = 5029,
  CU_FILE_INTERNAL_ERROR = 5030,
  CU_FILE_GETNEWFD_FAILED = 5031,
  CU_FILE_NVFS_SETUP_ERROR = 5033,
  CU_FILE_IO_DISABLED = 5034,
  CU_FILE_BATCH_SUBMIT_FAILED = 5035,
  CU_FILE_GPU_MEMORY_PINNING_FAILED = 5036,
  CU_FILE_BATCH_FULL = 5037,
  CU_FILE_ASYNC_NOT_SUPPORTED = 5038,
  CU_FILE_NOMEM_ERROR = 5043,
  CU_FILE_IO_ERROR = 5044
} CUfileOpError;

/* `cu_err` is CUDA's code where `err` is CU_FILE_CUDA_DRIVER_ERROR, else 0. */
typedef struct CUfileError {
  int err;
  int cu_err;
} CUfileError_t;

enum {
  CU_FILE_NFS_SUPPORTED = 2,
  CU_FILE_NVME_SUPPORTED = 4,
  CU_FILE_NVMEOF_SUPPORTED = 5,
  CU_FILE_SCSI_SUPPORTED = 6
};
enum { CU_FILE_USE_POLL_MODE = 0, CU_FILE_ALLOW_COMPAT_MODE = 1 };
enum { CU_FILE_BATCH_IO_SUPPORTED = 1, CU_FILE_STREAMS_SUPPORTED = 2, CU_FILE_PARALLEL_IO_SUPPORTED = 3 };

/* Sizes in KiB, but the flags, the batch's size in requests, and the milliseconds. */
typedef struct CUfileDrvProps {
  struct {
    unsigned major_version;
    unsigned minor_version;
    size_t poll_thresh_size;
    size_t max_direct_io_size;
    unsigned dstatusflags;
    unsigned dcontrolflags;
  } nvfs;
  unsigned fflags;
  unsigned max_device_cache_size;
  unsigned per_buffer_cache_size;
  unsigned max_device_pinned_mem_size;
  unsigned max_batch_io_size;
  unsigned max_batch_io_timeout_msecs;
} CUfileDrvProps_t;

enum { CU_FILE_RDMA_REGISTER = 1, CU_FILE_RDMA_RELAXED_ORDERING = 2 };

enum { CU_FILE_HANDLE_TYPE_OPAQUE_FD = 1, CU_FILE_HANDLE_TYPE_OPAQUE_WIN32 = 2, CU_FILE_HANDLE_TYPE_USERSPACE_FS = 3 };

typedef struct CUfileDescr {
  int type;
  union {
    int fd;
    void* handle;
  } handle;
  const void* fs_ops; /* of a file system in user space */
} CUfileDescr_t;

typedef void* CUfileHandle_t;
typedef void* CUfileBatchHandle_t;

enum { CUFILE_BATCH = 1 };
enum { CUFILE_READ = 0, CUFILE_WRITE = 1 };
enum {
  CUFILE_WAITING = 0x01,
  CUFILE_PENDING = 0x02,
  CUFILE_INVALID = 0x04,
  CUFILE_CANCELED = 0x08,
  CUFILE_COMPLETE = 0x10,
  CUFILE_TIMEOUT = 0x20,
  CUFILE_FAILED = 0x40
};

typedef struct CUfileIOParams {
  int mode; /* CUFILE_BATCH */
  union {
    struct {
      void* devPtr_base;
      off_t file_offset;
      off_t devPtr_offset;
      size_t size;
    } batch;
  } u;
  CUfileHandle_t fh;
  int opcode;
  void* cookie;
} CUfileIOParams_t;

typedef struct CUfileIOEvents {
  void* cookie;
  int status;
  size_t ret; /* bytes; as a signed number: -errno, or minus a CUfileOpError */
} CUfileIOEvents_t;

/* Of cuFile 1.17 and later. */
typedef struct CUfileIOVec {
  void* base;
  size_t len;
} CUfileIOVec_t;

enum {
  CU_FILE_STREAM_FIXED_BUF_OFFSET = 1,
  CU_FILE_STREAM_FIXED_FILE_OFFSET = 2,
  CU_FILE_STREAM_FIXED_FILE_SIZE = 4,
  CU_FILE_STREAM_PAGE_ALIGNED_INPUTS = 8
};

enum {
  CUFILE_PARAM_PROFILE_STATS,
  CUFILE_PARAM_EXECUTION_MAX_IO_QUEUE_DEPTH,
  CUFILE_PARAM_EXECUTION_MAX_IO_THREADS,
  CUFILE_PARAM_EXECUTION_MIN_IO_THRESHOLD_SIZE_KB,
  CUFILE_PARAM_EXECUTION_MAX_REQUEST_PARALLELISM,
  CUFILE_PARAM_PROPERTIES_MAX_DIRECT_IO_SIZE_KB,
  CUFILE_PARAM_PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB,
  CUFILE_PARAM_PROPERTIES_PER_BUFFER_CACHE_SIZE_KB,
  CUFILE_PARAM_PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB,
  CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE,
  CUFILE_PARAM_POLLTHRESHOLD_SIZE_KB,
  CUFILE_PARAM_PROPERTIES_BATCH_IO_TIMEOUT_MS,
  CUFILE_SIZE_PARAMETERS
};
enum {
  CUFILE_PARAM_PROPERTIES_USE_POLL_MODE,
  CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE,
  CUFILE_PARAM_FORCE_COMPAT_MODE,
  CUFILE_PARAM_FS_MISC_API_CHECK_AGGRESSIVE,
  CUFILE_PARAM_EXECUTION_PARALLEL_IO,
  CUFILE_PARAM_PROFILE_NVTX,
  CUFILE_PARAM_PROPERTIES_ALLOW_SYSTEM_MEMORY,
  CUFILE_PARAM_USE_PCIP2PDMA,
  CUFILE_PARAM_PREFER_IO_URING,
  CUFILE_PARAM_FORCE_ODIRECT_MODE,
  CUFILE_PARAM_SKIP_TOPOLOGY_DETECTION,
  CUFILE_PARAM_STREAM_MEMOPS_BYPASS,
  CUFILE_BOOL_PARAMETERS
};
enum { CUFILE_PARAM_LOGGING_LEVEL, CUFILE_PARAM_ENV_LOGFILE_PATH, CUFILE_PARAM_LOG_DIR, CUFILE_STRING_PARAMETERS };

typedef struct CUfileOpCounter {
  uint64_t ok;
  uint64_t err;
} CUfileOpCounter_t;

typedef struct CUfileStatsLevel1 {
  CUfileOpCounter_t read_ops, write_ops;
  CUfileOpCounter_t hdl_register_ops, hdl_deregister_ops, buf_register_ops, buf_deregister_ops;
  uint64_t read_bytes, write_bytes;
  uint64_t read_bw_bytes_per_sec, write_bw_bytes_per_sec;
  uint64_t read_lat_avg_us, write_lat_avg_us;
  uint64_t read_ops_per_sec, write_ops_per_sec;
  uint64_t read_lat_sum_us, write_lat_sum_us;
  CUfileOpCounter_t batch_submit_ops, batch_complete_ops, batch_setup_ops, batch_cancel_ops, batch_destroy_ops;
  CUfileOpCounter_t batch_enqueued_ops, batch_posix_enqueued_ops, batch_processed_ops, batch_posix_processed_ops;
  CUfileOpCounter_t batch_nvfs_submit_ops, batch_p2p_submit_ops, batch_aio_submit_ops, batch_iouring_submit_ops,
      batch_mixed_io_submit_ops, batch_total_submit_ops;
  uint64_t batch_read_bytes, batch_write_bytes;
  uint64_t batch_read_bw_bytes, batch_write_bw_bytes;
  uint64_t batch_submit_lat_avg_us, batch_completion_lat_avg_us;
  uint64_t batch_submit_ops_per_sec, batch_complete_ops_per_sec;
  uint64_t batch_submit_lat_sum_us, batch_completion_lat_sum_us;
  uint64_t last_batch_read_bytes, last_batch_write_bytes;
} CUfileStatsLevel1_t;

typedef struct CUfileStatsLevel2 {
  CUfileStatsLevel1_t basic;
  uint64_t read_size_kb_hist[32], write_size_kb_hist[32];
} CUfileStatsLevel2_t;

typedef struct CUfilePerGpuStats {
  char uuid[16];
  uint64_t read_bytes, read_bw_bytes_per_sec, read_utilization, read_duration_us;
  uint64_t n_total_reads, n_p2p_reads, n_nvfs_reads, n_posix_reads, n_unaligned_reads, n_dr_reads, n_sparse_regions,
      n_inline_regions, n_reads_err;
  uint64_t writes_bytes, write_bw_bytes_per_sec, write_utilization, write_duration_us;
  uint64_t n_total_writes, n_p2p_writes, n_nvfs_writes, n_posix_writes, n_unaligned_writes, n_dr_writes, n_writes_err;
  uint64_t n_mmap, n_mmap_ok, n_mmap_err, n_mmap_free, reg_bytes;
} CUfilePerGpuStats_t;

enum { CUFILE_STATS_GPUS = 16 };

typedef struct CUfileStatsLevel3 {
  CUfileStatsLevel2_t detailed;
  uint32_t num_gpus;
  CUfilePerGpuStats_t per_gpu_stats[CUFILE_STATS_GPUS];
} CUfileStatsLevel3_t;

CUFILE_API CUfileError_t cuFileDriverOpen(void);
CUFILE_API CUfileError_t cuFileDriverClose(void);
CUFILE_API CUfileError_t cuFileDriverClose_v2(void);
CUFILE_API long cuFileUseCount(void);
CUFILE_API CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t* props);
CUFILE_API CUfileError_t cuFileDriverSetPollMode(bool poll, size_t threshold_kb);
CUFILE_API CUfileError_t cuFileDriverSetMaxDirectIOSize(size_t kb);
CUFILE_API CUfileError_t cuFileDriverSetMaxCacheSize(size_t kb);
CUFILE_API CUfileError_t cuFileDriverSetMaxPinnedMemSize(size_t kb);
CUFILE_API CUfileError_t cuFileGetVersion(int* version);
CUFILE_API CUfileError_t cuFileGetBARSizeInKB(int gpu, size_t* kb);

CUFILE_API CUfileError_t cuFileHandleRegister(CUfileHandle_t* fh, CUfileDescr_t* descr);
CUFILE_API void cuFileHandleDeregister(CUfileHandle_t fh);
CUFILE_API CUfileError_t cuFileBufRegister(const void* base, size_t size, int flags);
CUFILE_API CUfileError_t cuFileBufDeregister(const void* base);

CUFILE_API ssize_t cuFileRead(CUfileHandle_t fh, void* base, size_t size, off_t file_offset, off_t buffer_offset);
CUFILE_API ssize_t cuFileWrite(CUfileHandle_t fh, const void* base, size_t size, off_t file_offset,
                               off_t buffer_offset);
CUFILE_API ssize_t cuFileReadv(CUfileHandle_t fh, const CUfileIOVec_t* vector, size_t count, off_t file_offset,
                               unsigned flags);
CUFILE_API ssize_t cuFileWritev(CUfileHandle_t fh, const CUfileIOVec_t* vector, size_t count, off_t file_offset,
                                unsigned flags);

CUFILE_API CUfileError_t cuFileBatchIOSetUp(CUfileBatchHandle_t* batch, unsigned nr);
CUFILE_API CUfileError_t cuFileBatchIOSubmit(CUfileBatchHandle_t batch, unsigned nr, CUfileIOParams_t* params,
                                             unsigned flags);
CUFILE_API CUfileError_t cuFileBatchIOGetStatus(CUfileBatchHandle_t batch, unsigned min_nr, unsigned* nr,
                                                CUfileIOEvents_t* events, struct timespec* timeout);
CUFILE_API CUfileError_t cuFileBatchIOCancel(CUfileBatchHandle_t batch);
CUFILE_API void cuFileBatchIODestroy(CUfileBatchHandle_t batch);

CUFILE_API CUfileError_t cuFileReadAsync(CUfileHandle_t fh, void* base, size_t* size, off_t* file_offset,
                                         off_t* buffer_offset, ssize_t* done, void* stream);
CUFILE_API CUfileError_t cuFileWriteAsync(CUfileHandle_t fh, void* base, size_t* size, off_t* file_offset,
                                          off_t* buffer_offset, ssize_t* done, void* stream);
CUFILE_API CUfileError_t cuFileStreamRegister(void* stream, unsigned flags);
CUFILE_API CUfileError_t cuFileStreamDeregister(void* stream);

CUFILE_API CUfileError_t cuFileGetParameterSizeT(int parameter, size_t* value);
CUFILE_API CUfileError_t cuFileGetParameterBool(int parameter, bool* value);
CUFILE_API CUfileError_t cuFileGetParameterString(int parameter, char* text, int size);
CUFILE_API CUfileError_t cuFileGetParameterMinMaxValue(int parameter, size_t* least, size_t* most);
CUFILE_API CUfileError_t cuFileSetParameterSizeT(int parameter, size_t value);
CUFILE_API CUfileError_t cuFileSetParameterBool(int parameter, bool value);
CUFILE_API CUfileError_t cuFileSetParameterString(int parameter, const char* text);
CUFILE_API CUfileError_t cuFileSetParameterPosixPoolSlabArray(const size_t* sizes, const size_t* counts, int length);
CUFILE_API CUfileError_t cuFileGetParameterPosixPoolSlabArray(size_t* sizes, size_t* counts, int length);
CUFILE_API CUfileError_t cuFileSetParameterGpuBounceBufferSlabArray(const size_t* sizes, const size_t* counts,
                                                                    int length);
CUFILE_API CUfileError_t cuFileGetParameterGpuBounceBufferSlabArray(size_t* sizes, size_t* counts, int length);

CUFILE_API CUfileError_t cuFileSetStatsLevel(int level);
CUFILE_API CUfileError_t cuFileGetStatsLevel(int* level);
CUFILE_API CUfileError_t cuFileStatsStart(void);
CUFILE_API CUfileError_t cuFileStatsStop(void);
CUFILE_API CUfileError_t cuFileStatsReset(void);
CUFILE_API CUfileError_t cuFileGetStatsL1(CUfileStatsLevel1_t* stats);
CUFILE_API CUfileError_t cuFileGetStatsL2(CUfileStatsLevel2_t* stats);
CUFILE_API CUfileError_t cuFileGetStatsL3(CUfileStatsLevel3_t* stats);

/* Later than 1.15, and about what there is none of here: peers' DMA and the machine's topology. Refused. */
CUFILE_API CUfileError_t cuFileDriverGetP2PFlags(int status_flag, int* flags);
CUFILE_API CUfileError_t cuFileDriverSetP2PFlags(int status_flag, int flags);
CUFILE_API CUfileError_t cuFileExportPCIeTopology(const char* path);

#ifdef __cplusplus
}
#endif

#endif /* UGDS_CUFILE_ABI_H */
