# SPDX-License-Identifier: Apache-2.0
"""The kernels of `ugds.bench.cuda`: text that the driver compiles for the GPU that is there.

ugds_spin(nanoseconds) runs that long; ugds_fill(address, bytes, seed) writes a pattern, byte i of which is
(seed + i * 2654435761) >> 16; ugds_check(address, bytes, seed, result) adds the number of bytes that differ from it to
the 64-bit number at `result`. All parameters are 64-bit numbers; any number of threads shares the bytes.
"""

from __future__ import annotations

KERNELS = ("ugds_spin", "ugds_fill", "ugds_check")

# This thread's first byte in %i, and in %step how many threads there are.
_INDEX = """\
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.u32 %r3, %r1, %r2, %r3;
  cvt.u64.u32 %i, %r3;
  mov.u32 %r1, %nctaid.x;
  mul.wide.u32 %step, %r1, %r2;"""

# The byte of the pattern at %i in %r1, and its address in %at.
_BYTE = """\
  mad.lo.u64 %value, %i, 2654435761, %seed;
  shr.u64 %value, %value, 16;
  cvt.u32.u64 %r1, %value;
  and.b32 %r1, %r1, 255;
  add.u64 %at, %base, %i;"""

_REGISTERS = """\
  .reg .pred %p;
  .reg .b32 %r<5>;
  .reg .b64 %base, %bytes, %seed, %i, %step, %value, %at, %wrong, %result;"""

PTX = f"""\
.version 7.0
.target sm_70
.address_size 64

.visible .entry ugds_spin(.param .u64 nanoseconds)
{{
  .reg .pred %p;
  .reg .b64 %wanted, %start, %now;
  ld.param.u64 %wanted, [nanoseconds];
  mov.u64 %start, %globaltimer;
spin_again:
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %start;
  setp.lt.u64 %p, %now, %wanted;
  @%p bra spin_again;
  ret;
}}

.visible .entry ugds_fill(.param .u64 address, .param .u64 bytes, .param .u64 seed)
{{
{_REGISTERS}
  ld.param.u64 %base, [address];
  ld.param.u64 %bytes, [bytes];
  ld.param.u64 %seed, [seed];
  cvta.to.global.u64 %base, %base;
{_INDEX}
fill_next:
  setp.ge.u64 %p, %i, %bytes;
  @%p bra fill_end;
{_BYTE}
  st.global.u8 [%at], %r1;
  add.u64 %i, %i, %step;
  bra fill_next;
fill_end:
  ret;
}}

.visible .entry ugds_check(.param .u64 address, .param .u64 bytes, .param .u64 seed, .param .u64 result)
{{
{_REGISTERS}
  ld.param.u64 %base, [address];
  ld.param.u64 %bytes, [bytes];
  ld.param.u64 %seed, [seed];
  ld.param.u64 %result, [result];
  cvta.to.global.u64 %base, %base;
  cvta.to.global.u64 %result, %result;
  mov.u64 %wrong, 0;
{_INDEX}
check_next:
  setp.ge.u64 %p, %i, %bytes;
  @%p bra check_end;
{_BYTE}
  ld.global.u8 %r4, [%at];
  setp.ne.u32 %p, %r4, %r1;
  @%p add.u64 %wrong, %wrong, 1;
  add.u64 %i, %i, %step;
  bra check_next;
check_end:
  setp.eq.u64 %p, %wrong, 0;
  @%p ret;
  red.global.add.u64 [%result], %wrong;
  ret;
}}
"""
