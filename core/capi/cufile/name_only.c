/* SPDX-License-Identifier: Apache-2.0
 *
 * libcufile.so, for programs that look for that name: all of it is in libcufile.so.0, which it needs. No symbolic link:
 * a wheel would make a second library of one, with a state of its own. */
extern const char ugds_cufile_is_in[];
const char ugds_cufile_is_in[] = "libcufile.so.0";
