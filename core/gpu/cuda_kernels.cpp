// SPDX-License-Identifier: Apache-2.0
//
// What of a request runs on the GPU's own processors. Words and orders lie in pinned memory of the processor's, and are
// read past any cache; so are the bytes, which a device has just written there. What is the same for every thread one
// of them reads: each thread's reading goes over the bus.
#include "gpu/cuda_driver.hpp"

namespace ugds::gpu {

namespace {

// One block of eight threads' loads in flight at once is what fills the bus: a single load takes more than a
// microsecond.
#define UGDS_LOAD(a, b, c, d) "  ld.volatile.global.v4.u32 {%v" #a ", %v" #b ", %v" #c ", %v" #d "}, [%x];\n"
#define UGDS_STORE(a, b, c, d) "  st.global.v4.u32 [%y], {%v" #a ", %v" #b ", %v" #c ", %v" #d "};\n"
#define UGDS_NEXT(address) "  add.u64 " address ", " address ", %stride;\n"
#define UGDS_BYTES(v, first, second, third, fourth)                       \
  "  st.global.u8 [%y+" #first "], %v" #v ";\n  shr.u32 %v" #v ", %v" #v  \
  ", 8;\n"                                                                \
  "  st.global.u8 [%y+" #second "], %v" #v ";\n  shr.u32 %v" #v ", %v" #v \
  ", 8;\n"                                                                \
  "  st.global.u8 [%y+" #third "], %v" #v ";\n  shr.u32 %v" #v ", %v" #v  \
  ", 8;\n"                                                                \
  "  st.global.u8 [%y+" #fourth "], %v" #v ";\n"

// A gpu::CopyOrder, into registers: one thread reads it for its block, which waits, and then all take it from there.
#define UGDS_READ_ORDER(from, to, size)                                                        \
  "  ld.volatile.global.u64 %" from ", [%order];\n  ld.volatile.global.u64 %" to               \
  ", [%order+8];\n"                                                                            \
  "  ld.volatile.global.u64 %" size ", [%order+16];\n  st.shared.u64 [order_" from "], %" from \
  ";\n"                                                                                        \
  "  st.shared.u64 [order_" to "], %" to ";\n  st.shared.u64 [order_" size "], %" size ";\n"
#define UGDS_TAKE_ORDER(from, to, size)                                               \
  "  ld.shared.u64 %" from ", [order_" from "];\n  ld.shared.u64 %" to ", [order_" to \
  "];\n"                                                                              \
  "  ld.shared.u64 %" size ", [order_" size "];\n"

// Copies %size bytes from %from to %to, by the thread that is number %me of %threads. In units of 16 bytes where both
// sides are aligned, eight of them in flight; where the source alone is, its units are stored byte by byte.
#define UGDS_COPY_BYTES \
  "{\n"                                                                                              \
  "  .reg .pred %q;\n"                                                                               \
  "  .reg .u32 %v<32>;\n"                                                                            \
  "  .reg .u64 %unit, %units, %reach, %stride, %x, %y;\n"                                            \
  "  mov.u64 %units, 0;\n"                                                                           \
  "  and.b64 %x, %from, 15;\n"                                                                       \
  "  setp.ne.u64 %q, %x, 0;\n"                                                                       \
  "  @%q bra BYTES;\n"                                                                               \
  "  shr.u64 %units, %size, 4;\n"                                                                    \
  "  mov.u64 %unit, %me;\n"                                                                          \
  "  mul.lo.u64 %reach, %threads, 7;\n"                                                              \
  "  shl.b64 %stride, %threads, 4;\n"                                                                \
  "  and.b64 %x, %to, 15;\n"                                                                         \
  "  setp.ne.u64 %q, %x, 0;\n"                                                                       \
  "  @%q bra SPLIT;\n"                                                                               \
  "EIGHT:\n"                                                                                         \
  "  add.u64 %x, %unit, %reach;\n"                                                                   \
  "  setp.ge.u64 %q, %x, %units;\n"                                                                  \
  "  @%q bra ONE;\n"                                                                                 \
  "  shl.b64 %y, %unit, 4;\n"                                                                        \
  "  add.u64 %x, %from, %y;\n"                                                                       \
  "  add.u64 %y, %to, %y;\n"                                                                         \
  UGDS_LOAD(0, 1, 2, 3) UGDS_NEXT("%x") UGDS_LOAD(4, 5, 6, 7) UGDS_NEXT("%x")                        \
  UGDS_LOAD(8, 9, 10, 11) UGDS_NEXT("%x") UGDS_LOAD(12, 13, 14, 15) UGDS_NEXT("%x")                  \
  UGDS_LOAD(16, 17, 18, 19) UGDS_NEXT("%x") UGDS_LOAD(20, 21, 22, 23) UGDS_NEXT("%x")                \
  UGDS_LOAD(24, 25, 26, 27) UGDS_NEXT("%x") UGDS_LOAD(28, 29, 30, 31)                                \
  UGDS_STORE(0, 1, 2, 3) UGDS_NEXT("%y") UGDS_STORE(4, 5, 6, 7) UGDS_NEXT("%y")                      \
  UGDS_STORE(8, 9, 10, 11) UGDS_NEXT("%y") UGDS_STORE(12, 13, 14, 15) UGDS_NEXT("%y")                \
  UGDS_STORE(16, 17, 18, 19) UGDS_NEXT("%y") UGDS_STORE(20, 21, 22, 23) UGDS_NEXT("%y")              \
  UGDS_STORE(24, 25, 26, 27) UGDS_NEXT("%y") UGDS_STORE(28, 29, 30, 31)                              \
  "  add.u64 %unit, %unit, %reach;\n"                                                                \
  "  add.u64 %unit, %unit, %threads;\n"                                                              \
  "  bra EIGHT;\n"                                                                                   \
  "ONE:\n"                                                                                           \
  "  setp.ge.u64 %q, %unit, %units;\n"                                                               \
  "  @%q bra REST;\n"                                                                                \
  "  shl.b64 %y, %unit, 4;\n"                                                                        \
  "  add.u64 %x, %from, %y;\n"                                                                       \
  "  add.u64 %y, %to, %y;\n"                                                                         \
  UGDS_LOAD(0, 1, 2, 3) UGDS_STORE(0, 1, 2, 3)                                                       \
  "  add.u64 %unit, %unit, %threads;\n"                                                              \
  "  bra ONE;\n"                                                                                     \
  "SPLIT:\n"                                                                                         \
  "  setp.ge.u64 %q, %unit, %units;\n"                                                               \
  "  @%q bra REST;\n"                                                                                \
  "  shl.b64 %y, %unit, 4;\n"                                                                        \
  "  add.u64 %x, %from, %y;\n"                                                                       \
  "  add.u64 %y, %to, %y;\n"                                                                         \
  UGDS_LOAD(0, 1, 2, 3)                                                                              \
  UGDS_BYTES(0, 0, 1, 2, 3) UGDS_BYTES(1, 4, 5, 6, 7) UGDS_BYTES(2, 8, 9, 10, 11)                    \
  UGDS_BYTES(3, 12, 13, 14, 15)                                                                      \
  "  add.u64 %unit, %unit, %threads;\n"                                                              \
  "  bra SPLIT;\n"                                                                                   \
  "REST:\n"                                                                                          \
  "  shl.b64 %units, %units, 4;\n"                                                                   \
  "BYTES:\n"                                                                                         \
  "  add.u64 %unit, %me, %units;\n"                                                                  \
  "NEXT_BYTE:\n"                                                                                     \
  "  setp.ge.u64 %q, %unit, %size;\n"                                                                \
  "  @%q bra COPIED;\n"                                                                              \
  "  add.u64 %x, %from, %unit;\n"                                                                    \
  "  ld.volatile.global.u8 %v0, [%x];\n"                                                             \
  "  add.u64 %y, %to, %unit;\n"                                                                      \
  "  st.global.u8 [%y], %v0;\n"                                                                      \
  "  add.u64 %unit, %unit, %threads;\n"                                                              \
  "  bra NEXT_BYTE;\n"                                                                               \
  "COPIED:\n"                                                                                        \
  "}\n"

}  // namespace

// ugds_copy: what the gpu::CopyOrder of the block's row says.
// ugds_pieces: see gpu::Pieces. A block's first thread speaks with the processor, and the others follow; of several
// blocks each takes every so many-th piece, and has a word of its own beside the first one's.
const char kKernels[] =
    R"(
.version 6.0
.target sm_50
.address_size 64

.visible .entry ugds_copy(.param .u64 orders)
{
  .shared .u64 order_from, order_to, order_size;
  .reg .pred %p;
  .reg .u32 %a, %b;
  .reg .u64 %order, %row, %from, %to, %size, %me, %threads;

  mov.u32 %a, %tid.x;
  setp.ne.u32 %p, %a, 0;
  @%p bra GIVEN;
  ld.param.u64 %order, [orders];
  mov.u32 %a, %ctaid.y;
  mul.wide.u32 %row, %a, 24;
  add.u64 %order, %order, %row;
)" UGDS_READ_ORDER("from", "to", "size") R"(GIVEN:
  bar.sync 0;
)" UGDS_TAKE_ORDER("from", "to", "size") R"(  mov.u32 %a, %ctaid.x;
  mov.u32 %b, %ntid.x;
  mul.wide.u32 %me, %a, %b;
  mov.u32 %a, %tid.x;
  cvt.u64.u32 %threads, %a;
  add.u64 %me, %me, %threads;
  mov.u32 %a, %nctaid.x;
  mul.wide.u32 %threads, %a, %b;
)" UGDS_COPY_BYTES R"(
  ret;
}

.visible .entry ugds_pieces(.param .u64 reached_word, .param .u64 reached_at, .param .u64 allowed_word,
                            .param .u64 allowed_at, .param .u64 order_address, .param .u64 source_address,
                            .param .u64 destination_address, .param .u64 byte_count, .param .u64 piece_size,
                            .param .u64 area_size, .param .u64 piece_count, .param .u64 what_to_tell)
{
  .shared .u32 given_up;
  .shared .u64 order_source, order_goal, order_bytes;
  .reg .pred %p, %first, %gathers;
  .reg .u32 %a;
  .reg .u64 %reached, %come, %allowed, %wanted, %order, %source, %goal, %bytes, %piece, %area, %count, %tell;
  .reg .u64 %from, %to, %size, %me, %threads, %at, %through, %number, %blocks, %step, %word;

  ld.param.u64 %reached, [reached_word];
  ld.param.u64 %come, [reached_at];
  ld.param.u64 %allowed, [allowed_word];
  ld.param.u64 %wanted, [allowed_at];
  ld.param.u64 %order, [order_address];
  ld.param.u64 %source, [source_address];
  ld.param.u64 %goal, [destination_address];
  ld.param.u64 %bytes, [byte_count];
  ld.param.u64 %piece, [piece_size];
  ld.param.u64 %area, [area_size];
  ld.param.u64 %count, [piece_count];
  ld.param.u64 %tell, [what_to_tell];
  mov.u32 %a, %tid.x;
  setp.eq.u32 %first, %a, 0;
  cvt.u64.u32 %me, %a;
  mov.u32 %a, %ntid.x;
  cvt.u64.u32 %threads, %a;
  mov.u32 %a, %ctaid.x;
  cvt.u64.u32 %number, %a;
  mov.u32 %a, %nctaid.x;
  cvt.u64.u32 %blocks, %a;
  shl.b64 %word, %number, 3;
  add.u64 %reached, %reached, %word;
  mul.lo.u64 %step, %piece, %blocks;
  mul.lo.u64 %at, %piece, %number;
  mov.u64 %through, %at;
  and.b64 %word, %tell, 4;
  setp.ne.u64 %gathers, %word, 0;

  add.u64 %come, %come, 1;
  and.b64 %word, %tell, 1;
  setp.ne.u64 %p, %word, 0;
  and.pred %p, %p, %first;
  @%p st.volatile.global.u64 [%reached], %come;

  add.u64 %wanted, %wanted, %number;
  add.u64 %wanted, %wanted, 1;

NEXT_PIECE:
  @!%first bra ALLOWED;
ASK:
  ld.volatile.global.u64 %word, [%allowed];
  sub.s64 %word, %word, %wanted;
  setp.lt.s64 %p, %word, 0;
  @%p bra ASK;
  membar.sys;
  setp.ge.s64 %p, %word, 0x100000000;
  selp.u32 %a, 1, 0, %p;
  st.shared.u32 [given_up], %a;
  setp.eq.u64 %p, %order, 0;
  @%p bra ALLOWED;
)" UGDS_READ_ORDER("source", "goal", "bytes") R"(ALLOWED:
  bar.sync 0;
  ld.shared.u32 %a, [given_up];
  setp.ne.u32 %p, %a, 0;
  @%p ret;
  setp.eq.u64 %p, %order, 0;
  @%p bra KNOWN;
)" UGDS_TAKE_ORDER("source", "goal", "bytes") R"(  mov.u64 %order, 0;
KNOWN:
  min.u64 %size, %through, %bytes;
  sub.u64 %size, %bytes, %size;
  min.u64 %size, %size, %piece;
  selp.u64 %from, %through, %at, %gathers;
  selp.u64 %to, %at, %through, %gathers;
  add.u64 %from, %from, %source;
  add.u64 %to, %to, %goal;
)" UGDS_COPY_BYTES R"(
  add.u64 %through, %through, %step;
  add.u64 %at, %at, %step;
  setp.ge.u64 %p, %at, %area;
  selp.u64 %word, %area, 0, %p;
  sub.u64 %at, %at, %word;

  bar.sync 0;
  and.b64 %word, %tell, 2;
  setp.eq.u64 %p, %word, 0;
  @%p bra TOLD;
  add.u64 %come, %come, 1;
  @!%first bra TOLD;
  membar.sys;
  st.volatile.global.u64 [%reached], %come;
TOLD:
  add.u64 %number, %number, %blocks;
  add.u64 %wanted, %wanted, %blocks;
  setp.lt.u64 %p, %number, %count;
  @%p bra NEXT_PIECE;
  ret;
}
)";

}  // namespace ugds::gpu
