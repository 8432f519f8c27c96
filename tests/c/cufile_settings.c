/* SPDX-License-Identifier: Apache-2.0
 *
 * The cuFile-compatible library's parameters, where their values come from, and its statistics. */
#define _GNU_SOURCE
#include <errno.h>

#include "cufile.h"

static unsigned char buffer[65536] __attribute__((aligned(4096)));

static size_t size_of(int parameter) {
  size_t value = ~(size_t)0;
  CHECK(cuFileGetParameterSizeT(parameter, &value).err == CU_FILE_SUCCESS);
  return value;
}
static int truth_of(int parameter) {
  bool value = false;
  CHECK(cuFileGetParameterBool(parameter, &value).err == CU_FILE_SUCCESS);
  return value;
}
static int text_is(int parameter, const char* expected) {
  char text[256] = "?";
  CHECK(cuFileGetParameterString(parameter, text, sizeof text).err == CU_FILE_SUCCESS);
  return strcmp(text, expected) == 0;
}

static void defaults_and_limits_are_those_documented(void) {
  static const struct {
    int parameter;
    size_t value, least, most;
  } rows[] = {
      {CUFILE_PARAM_PROFILE_STATS, 0, 0, 3},
      {CUFILE_PARAM_EXECUTION_MAX_IO_QUEUE_DEPTH, 128, 1, 256},
      {CUFILE_PARAM_EXECUTION_MAX_IO_THREADS, 4, 0, 32},
      {CUFILE_PARAM_EXECUTION_MIN_IO_THRESHOLD_SIZE_KB, 8192, 4, 4294967295u},
      {CUFILE_PARAM_EXECUTION_MAX_REQUEST_PARALLELISM, 4, 0, 8},
      {CUFILE_PARAM_PROPERTIES_MAX_DIRECT_IO_SIZE_KB, 16384, 64, 16384},
      {CUFILE_PARAM_PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB, 131072, 0, 18014398509481980u},
      {CUFILE_PARAM_PROPERTIES_PER_BUFFER_CACHE_SIZE_KB, 1024, 64, 16384},
      {CUFILE_PARAM_PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB, 33554432, 64, 18014398509481980u},
      {CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE, 128, 1, 256},
      {CUFILE_PARAM_POLLTHRESHOLD_SIZE_KB, 4, 4, 18014398509481980u},
      {CUFILE_PARAM_PROPERTIES_BATCH_IO_TIMEOUT_MS, 5, 1, 1000},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
    size_t least = 1, most = 0;
    CHECK(cuFileGetParameterMinMaxValue(rows[i].parameter, &least, &most).err == CU_FILE_SUCCESS);
    CHECK(least == rows[i].least && most == rows[i].most && size_of(rows[i].parameter) == rows[i].value);
  }
  static const bool truths[CUFILE_BOOL_PARAMETERS] = {false, true,  false, false, true,  false,
                                                      true,  false, false, false, false, false};
  for (int i = 0; i < CUFILE_BOOL_PARAMETERS; ++i) CHECK(truth_of(i) == truths[i]);
  CHECK(text_is(CUFILE_PARAM_LOGGING_LEVEL, "ERROR") && text_is(CUFILE_PARAM_LOG_DIR, ""));
  size_t value, sizes[3], counts[3];
  bool truth;
  char text[5];
  CHECK(cuFileGetParameterSizeT(CUFILE_SIZE_PARAMETERS, &value).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileGetParameterSizeT(-1, &value).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileGetParameterSizeT(1, NULL).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileGetParameterMinMaxValue(1, NULL, &value).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileGetParameterBool(CUFILE_BOOL_PARAMETERS, &truth).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileGetParameterBool(0, NULL).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileGetParameterString(CUFILE_STRING_PARAMETERS, text, 5).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileGetParameterString(0, text, 5).err == CU_FILE_INVALID_VALUE); /* "ERROR" and its end need 6 */
  CHECK(cuFileGetParameterString(0, NULL, 5).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileGetParameterPosixPoolSlabArray(sizes, counts, 3).err == CU_FILE_SUCCESS);
  CHECK(sizes[0] == 4 && sizes[1] == 1024 && sizes[2] == 16384 && counts[0] == 128 && counts[2] == 64);
  CHECK(cuFileGetParameterPosixPoolSlabArray(sizes, counts, 2).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileGetParameterPosixPoolSlabArray(NULL, counts, 3).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileGetParameterGpuBounceBufferSlabArray(sizes, counts, 1).err == CU_FILE_SUCCESS && sizes[0] == 1024);
}

static void what_is_set_is_staged_until_the_driver_opens(void) {
  CHECK(cuFileSetParameterSizeT(CUFILE_SIZE_PARAMETERS, 1).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileSetParameterBool(CUFILE_BOOL_PARAMETERS, true).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileSetParameterString(0, "").err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileSetParameterString(0, NULL).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileSetParameterSizeT(CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE, 300).err == CU_FILE_SUCCESS);
  CHECK(size_of(CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE) == 300);
  CHECK(cuFileDriverOpen().err == CU_FILE_DRIVER_INVALID_PROPS && cuFileUseCount() == 0);
  CHECK(cuFileSetParameterSizeT(CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE, 16).err == CU_FILE_SUCCESS);
  CHECK(cuFileSetParameterBool(CUFILE_PARAM_PROPERTIES_USE_POLL_MODE, true).err == CU_FILE_SUCCESS);
  CHECK(cuFileSetParameterString(CUFILE_PARAM_LOGGING_LEVEL, "INFO").err == CU_FILE_SUCCESS);
  const size_t sizes[2] = {4, 64}, counts[2] = {7, 3}, descending[2] = {64, 4}, odd[1] = {3};
  CHECK(cuFileSetParameterPosixPoolSlabArray(sizes, counts, 2).err == CU_FILE_SUCCESS);
  CHECK(cuFileSetParameterPosixPoolSlabArray(descending, counts, 2).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileSetParameterPosixPoolSlabArray(odd, counts, 1).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileSetParameterPosixPoolSlabArray(sizes, NULL, 2).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileSetParameterGpuBounceBufferSlabArray(sizes, counts, 0).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileSetParameterGpuBounceBufferSlabArray(sizes, counts, 2).err == CU_FILE_SUCCESS);
  CHECK(cuFileDriverOpen().err == CU_FILE_SUCCESS);
  CHECK(cuFileSetParameterSizeT(0, 1).err == CU_FILE_DRIVER_ALREADY_OPEN);
  CHECK(cuFileSetParameterBool(0, true).err == CU_FILE_DRIVER_ALREADY_OPEN);
  CHECK(cuFileSetParameterString(0, "WARN").err == CU_FILE_DRIVER_ALREADY_OPEN);
  CHECK(cuFileSetParameterPosixPoolSlabArray(sizes, counts, 2).err == CU_FILE_DRIVER_ALREADY_OPEN);
  CHECK(size_of(CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE) == 16 && truth_of(CUFILE_PARAM_PROPERTIES_USE_POLL_MODE));
  CHECK(text_is(CUFILE_PARAM_LOGGING_LEVEL, "INFO"));
  size_t back[2], back_counts[2];
  CHECK(cuFileGetParameterPosixPoolSlabArray(back, back_counts, 2).err == CU_FILE_SUCCESS);
  CHECK(memcmp(back, sizes, sizeof back) == 0 && memcmp(back_counts, counts, sizeof back) == 0);
  CUfileBatchHandle_t batch;
  CHECK(cuFileBatchIOSetUp(&batch, 17).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileDriverClose().err == CU_FILE_SUCCESS);
  CHECK(size_of(CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE) == 128); /* what was staged has been used */
}

static void write_configuration(const char* path, const char* text) {
  FILE* file = fopen(path, "w");
  REQUIRE(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
}

#define SLABS(sizes, counts) \
  "{\"properties\": {\"posix_pool_slab_size_kb\": " sizes ", \"posix_pool_slab_count\": " counts "}}"

static void the_program_comes_before_the_environment_and_that_before_the_file(void) {
  char path[] = "cufile-json-XXXXXX";
  REQUIRE(mkstemp(path) >= 0);
  write_configuration(
      path,
      "// a comment\n{\"properties\": {\"io_batchsize\": 200, /* another */ \"allow_compat_mode\": false,"
      "\"force_compat_mode\": true, \"posix_pool_slab_size_kb\": [4, 8],"
      "\"posix_pool_slab_count\": [1, 2], \"of_another_release\": {}},\n"
      "\"logging\": {\"level\": \"DEBUG\", \"dir\": \"logs\"}, \"profile\": {\"cufile_stats\": 2}}\n");
  setenv("CUFILE_ENV_PATH_JSON", path, 1);
  size_t sizes[2], counts[2];
  CHECK(size_of(CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE) == 200 && size_of(CUFILE_PARAM_PROFILE_STATS) == 2);
  CHECK(!truth_of(CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE) && truth_of(CUFILE_PARAM_FORCE_COMPAT_MODE));
  CHECK(text_is(CUFILE_PARAM_LOGGING_LEVEL, "DEBUG") && text_is(CUFILE_PARAM_LOG_DIR, "logs"));
  CHECK(cuFileGetParameterPosixPoolSlabArray(sizes, counts, 2).err == CU_FILE_SUCCESS && counts[1] == 2);
  setenv("CUFILE_ALLOW_COMPAT_MODE", "TRUE", 1);
  setenv("CUFILE_FORCE_COMPAT_MODE", "0", 1);
  setenv("CUFILE_LOGGING_LEVEL", "TRACE", 1);
  setenv("CUFILE_LOGFILE_PATH", "elsewhere.log", 1);
  CHECK(truth_of(CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE) && !truth_of(CUFILE_PARAM_FORCE_COMPAT_MODE));
  CHECK(text_is(CUFILE_PARAM_LOGGING_LEVEL, "TRACE") && text_is(CUFILE_PARAM_ENV_LOGFILE_PATH, "elsewhere.log"));
  CHECK(cuFileSetParameterBool(CUFILE_PARAM_FORCE_COMPAT_MODE, true).err == CU_FILE_SUCCESS);
  CHECK(cuFileSetParameterString(CUFILE_PARAM_LOGGING_LEVEL, "WARN").err == CU_FILE_SUCCESS);
  CHECK(truth_of(CUFILE_PARAM_FORCE_COMPAT_MODE) && text_is(CUFILE_PARAM_LOGGING_LEVEL, "WARN"));
  setenv("CUFILE_ALLOW_COMPAT_MODE", "perhaps", 1);
  CHECK(cuFileDriverOpen().err == CU_FILE_DRIVER_INVALID_PROPS);
  unsetenv("CUFILE_ALLOW_COMPAT_MODE");
  CHECK(cuFileDriverOpen().err == CU_FILE_SUCCESS);
  int level = 0;
  CHECK(cuFileGetStatsLevel(&level).err == CU_FILE_SUCCESS && level == 2);
  CHECK(cuFileDriverClose().err == CU_FILE_SUCCESS);
  static const char* const wrong[] = {"{\"properties\": {\"io_batchsize\": ",
                                      "{\"properties\": {\"io_batchsize\": \"a\"}}",
                                      "{\"properties\": {\"io_batchsize\": 257}}",
                                      "{\"properties\": {\"allow_compat_mode\": 1}}",
                                      "{\"logging\": {\"dir\": 1}}",
                                      "{\"properties\": {\"posix_pool_slab_size_kb\": [4]}}",
                                      SLABS("[8, 4]", "[1, 1]"),
                                      SLABS("[6]", "[1]"),
                                      SLABS("[4]", "[0]"),
                                      SLABS("[0]", "[1]"),
                                      "[]",
                                      "null",
                                      "{\"properties\": [200]}",
                                      "{\"properties\": {\"max_direct_io_size_kb\": 65}}"};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    write_configuration(path, wrong[i]);
    CHECK(cuFileDriverOpen().err == CU_FILE_DRIVER_INVALID_PROPS);
  }
  setenv("CUFILE_ENV_PATH_JSON", "/", 1); /* a directory */
  CHECK(cuFileDriverOpen().err == CU_FILE_DRIVER_INVALID_PROPS);
  setenv("CUFILE_ENV_PATH_JSON", path, 1);
  unlink(path);
  CHECK(cuFileDriverOpen().err == CU_FILE_SUCCESS); /* a file that is not there says nothing */
  CHECK(cuFileDriverClose().err == CU_FILE_SUCCESS);
  unsetenv("CUFILE_ENV_PATH_JSON");
  CHECK(cuFileSetStatsLevel(0).err == CU_FILE_SUCCESS);
}

static void statistics_are_of_what_went_through(void) {
  CUfileStatsLevel1_t one;
  static CUfileStatsLevel2_t two;
  static CUfileStatsLevel3_t three;
  CHECK(cuFileStatsStart().err == CU_FILE_DRIVER_NOT_INITIALIZED);
  CHECK(cuFileStatsStop().err == CU_FILE_DRIVER_NOT_INITIALIZED);
  CHECK(cuFileStatsReset().err == CU_FILE_DRIVER_NOT_INITIALIZED);
  CHECK(cuFileGetStatsL1(&one).err == CU_FILE_DRIVER_NOT_INITIALIZED);
  CHECK(cuFileDriverOpen().err == CU_FILE_SUCCESS);
  CHECK(cuFileSetStatsLevel(4).err == CU_FILE_INVALID_VALUE && cuFileSetStatsLevel(-1).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileGetStatsLevel(NULL).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileStatsStart().err == CU_FILE_INVALID_VALUE); /* no level was set */
  CHECK(cuFileSetStatsLevel(1).err == CU_FILE_SUCCESS && cuFileStatsReset().err == CU_FILE_SUCCESS);
  CHECK(cuFileStatsStart().err == CU_FILE_SUCCESS);
  CHECK(cuFileGetStatsL2(&two).err == CU_FILE_INVALID_VALUE && cuFileGetStatsL1(NULL).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileSetStatsLevel(3).err == CU_FILE_SUCCESS);
  const int fd = make_file(1 << 20);
  const CUfileHandle_t fh = register_file(fd);
  CHECK(cuFileBufRegister(buffer, sizeof buffer, 0).err == CU_FILE_SUCCESS);
  for (int i = 0; i < 3; ++i) CHECK(cuFileRead(fh, buffer, 65536, 0, 0) == 65536);
  CHECK(cuFileRead(fh, buffer, 512, 1, 0) == 512);
  CHECK(cuFileWrite(fh, buffer, 4096, 0, 0) == 4096);
  CHECK(cuFileRead(fh, buffer, 1, -1, 0) < 0);
  CUfileBatchHandle_t batch;
  CUfileIOParams_t p = {.mode = CUFILE_BATCH, .fh = fh, .opcode = CUFILE_READ};
  p.u.batch.devPtr_base = buffer;
  p.u.batch.size = 8192;
  CUfileIOEvents_t event;
  unsigned nr = 1;
  CHECK(cuFileBatchIOSetUp(&batch, 4).err == CU_FILE_SUCCESS && cuFileBatchIOSubmit(batch, 1, &p, 0).err == 0);
  CHECK(cuFileBatchIOGetStatus(batch, 1, &nr, &event, NULL).err == CU_FILE_SUCCESS && nr == 1);
  cuFileBatchIODestroy(batch);
  CHECK(cuFileBufDeregister(buffer).err == CU_FILE_SUCCESS);
  CHECK(cuFileStatsStop().err == CU_FILE_SUCCESS);
  CHECK(cuFileRead(fh, buffer, 4096, 0, 0) == 4096); /* not counted any more */
  CHECK(cuFileGetStatsL3(&three).err == CU_FILE_SUCCESS && cuFileGetStatsL2(&two).err == CU_FILE_SUCCESS);
  CHECK(cuFileGetStatsL1(&one).err == CU_FILE_SUCCESS && memcmp(&one, &two.basic, sizeof one) == 0);
  CHECK(one.read_ops.ok == 4 && one.read_ops.err == 1 && one.write_ops.ok == 1 && one.write_ops.err == 0);
  CHECK(one.read_bytes == 3 * 65536 + 512 && one.write_bytes == 4096);
  CHECK(one.hdl_register_ops.ok == 1 && one.buf_register_ops.ok == 1 && one.buf_deregister_ops.ok == 1);
  CHECK(one.read_bw_bytes_per_sec > 0 && one.read_ops_per_sec > 0);
  CHECK(one.read_lat_avg_us == one.read_lat_sum_us / 5 || one.read_lat_avg_us <= one.read_lat_sum_us);
  CHECK(one.batch_setup_ops.ok == 1 && one.batch_submit_ops.ok == 1 && one.batch_destroy_ops.ok == 1);
  CHECK(one.batch_enqueued_ops.ok == 1 && one.batch_processed_ops.ok == 1 && one.batch_complete_ops.ok == 1);
  CHECK(one.batch_read_bytes == 8192 && one.last_batch_read_bytes == 8192 && one.batch_write_bytes == 0);
  CHECK(two.read_size_kb_hist[0] == 1 && two.read_size_kb_hist[7] == 3 && two.read_size_kb_hist[4] == 1);
  CHECK(two.write_size_kb_hist[3] == 1 && memcmp(&three.detailed, &two, sizeof two) == 0);
  CHECK(cuFileStatsReset().err == CU_FILE_SUCCESS && cuFileGetStatsL1(&one).err == CU_FILE_SUCCESS);
  CHECK(one.read_ops.ok == 0 && one.read_bytes == 0 && one.hdl_register_ops.ok == 0);
  cuFileHandleDeregister(fh);
  close(fd);
  CHECK(cuFileDriverClose().err == CU_FILE_SUCCESS);
}

int main(void) {
  static const char* const variables[] = {"CUFILE_ENV_PATH_JSON", "CUFILE_ALLOW_COMPAT_MODE",
                                          "CUFILE_LOGGING_LEVEL", "CUFILE_FORCE_COMPAT_MODE",
                                          "CUFILE_LOGFILE_PATH",  "CUFILE_NVTX",
                                          "CUFILE_USE_PCIP2PDMA"};
  for (size_t i = 0; i < sizeof variables / sizeof *variables; ++i) unsetenv(variables[i]);
  if (access("/etc/cufile.json", R_OK) != 0) defaults_and_limits_are_those_documented();
  what_is_set_is_staged_until_the_driver_opens();
  the_program_comes_before_the_environment_and_that_before_the_file();
  statistics_are_of_what_went_through();
  return checks_summary();
}
