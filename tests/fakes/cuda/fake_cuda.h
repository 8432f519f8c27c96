/* SPDX-License-Identifier: Apache-2.0
 *
 * What tests may ask of the fake CUDA driver, beyond the driver's own functions (cuda_driver.h). Names are strings, so
 * that Python's ctypes and C++ use one interface. All of it is thread-safe, and none of it counts as a driver call.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Sets a trait; 0, or -1 where the name is unknown. It takes effect at once:
 *   gpus                   how many there are, 0 to 8 (default: FAKE_CUDA_GPUS, else 2)
 *   connections            per GPU, 1 to 32 (default: CUDA_DEVICE_MAX_CONNECTIONS, else 8)
 *   stream_words           whether streams can write words and wait for them (1)
 *   dmabuf                 whether memory can be exported as a DMA-BUF (1)
 *   dmabuf_pcie            whether that works with the PCIe mapping flag (0, as on the H200: 801)
 *   reuse_streams          whether a stream that is made may get the handle of one that was destroyed (0)
 *   dmabuf_descriptor      what is given for such a DMA-BUF: a duplicate of this descriptor, whatever is behind it; -1:
 *                          a file of the right size, which nobody can map (-1)
 *   copy_bytes_per_second  how fast a copy is; 0: as fast as it goes (0)
 *   copy_microseconds      what a copy takes besides (0)
 *   driver_version         what cuDriverGetVersion says (13000) */
int fake_cuda_set(const char* name, double value);
/* A trait's value, -1 where the name is unknown. */
double fake_cuda_get(const char* name);

/* Lets the nth call from now (1: the next) of the driver's function `name` do nothing and return `code`; nth 0: every
 * call, until fake_cuda_reset. 0, or -1 where there is no such function. */
int fake_cuda_fail(const char* name, uint64_t nth, int code);

/* How often the function was called since the last reset; NULL: all of them together. */
uint64_t fake_cuda_calls(const char* name);

/* How many there are now: "allocations" (of device and managed memory), "host_allocations", "pins", "streams",
 * "events", "contexts", "modules", "graphs", "exports" (descriptors still open are not known: all that were made since
 * the reset), "waiting" (streams that wait for a word), "calling" (streams in a host function or in line for one);
 * UINT64_MAX where the name is unknown. */
uint64_t fake_cuda_live(const char* name);

/* How often the driver was misused since the last reset in a way that corrupts, deadlocks or is slow in silence on
 * real hardware, and what the last one was ("" where there was none; the text stays until the next misuse). */
uint64_t fake_cuda_misuse(void);
const char* fake_cuda_misuse_text(void);

/* Copies between the caller and device memory at once, past all streams and locks: what a device's DMA would do, or a
 * test that looks. 0, or -1 where the range is in no allocation. */
int fake_cuda_peek(void* to, uint64_t device, size_t size);
int fake_cuda_poke(uint64_t device, const void* from, size_t size);

/* Ends every wait for a word that was enqueued until now, as if the word had come: for a test that has failed. */
void fake_cuda_release_waits(void);

/* The library's own file: what UGDS_CUDA_LIBRARY is set to by a program that is linked with it. */
const char* fake_cuda_path(void);

/* Traits, faults and counts as they were when the library was loaded. What is live stays. */
void fake_cuda_reset(void);

#ifdef __cplusplus
}
#endif
